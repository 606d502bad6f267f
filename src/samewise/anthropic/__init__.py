"""Anthropic's wire format, Messages: a thin translation onto the parsed request of a chat, no HTTP.

Holds: bodies the types of requests and responses; blocks content blocks to messages of a chat; parse bodies
to a chat; builder the blocks and events of an answer; exchange one request and its answer; errors in
Anthropic's form.
State: none; a MessageBuilder belongs to the answer it is made for.
Imports: openai, and what it imports.
"""
