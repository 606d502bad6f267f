"""OpenAI's Responses: a thin translation onto the parsed request of a chat, and the answer as items.

Holds: bodies the types of requests and responses; items input items to messages; parse bodies to a chat;
builder the items and events of an answer; exchange one request and its answer, and the record that is stored.
State: none; a ResponseBuilder belongs to the response it is made for. Records are kept by the server.
Imports: the modules of openai, and what they import.
"""
