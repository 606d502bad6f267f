"""OpenAI's wire format: request bodies in, response bodies and events out. No HTTP and no engine.

Holds: bodies the types of requests and responses; json_body JSON to a body; unsupported the fields that are
    refused; parse bodies to a request, with SamplingParams; messages for the chat template; formats
    response_format to a grammar; tools of a request; tool_calls in an answer; replies complete responses;
    stream events; errors in OpenAI's form; training what trainers send and expect.
State: none; a StreamWriter and a ToolCallParser belong to the response they are made for.
Imports: outputs, params, config, types, errors, text.
"""
