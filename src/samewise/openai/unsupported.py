"""Fields that are refused by name: of other servers and other endpoints, which would change the output.

Any other unknown field is ignored.
"""

from __future__ import annotations

from pydantic import BaseModel

from samewise.openai.bodies import CHAT, COMPLETIONS, CompletionBody
from samewise.openai.errors import unsupported

UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    # name: (values that change nothing, what to do instead)
    "add_special_tokens": ((), "is not supported; give the prompt as token ids"),
    "audio": ((), "is not supported; text only"),
    "bad_words_ids": ((), "is not supported; use bad_words"),
    "best_of": ((1,), "is not supported; ask for n answers and choose"),
    "chat_template": ((), "is not taken from requests; the model's own is used"),
    "conversation": ((), "is not supported; send the whole conversation"),
    "custom_logit_processor": ((), "is not supported; use logit_bias"),
    "do_sample": ((), "is not known here; use temperature, 0 is greedy"),
    "documents": ((), "is not supported; put them into a message"),
    "dry_multiplier": ((0,), "is not supported; use repetition_penalty"),
    "dynatemp_range": ((0,), "is not supported; use temperature"),
    "early_stopping": ((False,), "is not supported; there is no beam search"),
    "ebnf": ((), "is not supported; use structured_outputs.grammar"),
    "epsilon_cutoff": ((0,), "is not supported; use top_p or min_p"),
    "eta_cutoff": ((0,), "is not supported; use top_p or min_p"),
    "function_call": (("none",), "is not supported; use tools and tool_choice"),
    "functions": (([],), "is not supported; use tools"),
    "grammar": (("",), "is not supported; use structured_outputs.grammar"),
    "guided_choice": ((), "is not supported; use response_format"),
    "guided_decoding_backend": ((), "is not supported; use response_format"),
    "guided_grammar": ((), "is not supported; use structured_outputs.grammar"),
    "guided_json": ((), "is not supported; use response_format"),
    "guided_json_object": ((False,), "is not supported; use response_format"),
    "guided_regex": ((), "is not supported; use response_format"),
    "guided_whitespace_pattern": ((), "is not supported; use response_format"),
    "include": (([],), "is for /v1/responses; use logprobs"),
    "json_schema": ((), "is not supported; use response_format"),
    "length_penalty": ((1, 1.0), "is not supported; there is no beam search"),
    "logits_processors": (([],), "is not supported; use logit_bias"),
    "lora": (([],), "is not supported; serve the merged weights"),
    "lora_path": ((), "is not supported; serve the merged weights"),
    "max_length": ((), "is not known here; use max_tokens"),
    "max_new_tokens": ((), "is not known here; use max_tokens"),
    "max_output_tokens": ((), "is not known here; use max_tokens"),
    "min_new_tokens": ((0,), "is not known here; use min_tokens"),
    "mirostat": ((0,), "is not supported; use temperature and top_p"),
    "mirostat_mode": ((0,), "is not supported; use temperature and top_p"),
    "mm_processor_kwargs": ((), "is not supported; text only"),
    "modalities": ((["text"],), "other than ['text'] is not supported"),
    "n_predict": ((), "is not known here; use max_tokens"),
    "no_repeat_ngram_size": ((0,), "is not supported; use repetition_penalty"),
    "no_stop_trim": ((False,), "is not known here; use include_stop_str_in_output"),
    "num_beams": ((1,), "is not supported; ask for n answers and choose"),
    "num_predict": ((), "is not known here; use max_tokens"),
    "num_return_sequences": ((1,), "is not known here; use n"),
    "output_config": (({},), "is not known here; use response_format, or /v1/messages"),
    "output_format": ((), "is not known here; use response_format"),
    "penalty_alpha": ((0,), "is not supported; use repetition_penalty"),
    "previous_response_id": ((), "is for /v1/responses; send the whole conversation"),
    "prompt_embeds": ((), "is not supported; give text or token ids"),
    "reasoning": ((), "is not known here; use reasoning_effort, or /v1/responses"),
    "reasoning_budget": ((-1,), "is not supported; use max_tokens"),
    "reasoning_format": (("auto", "deepseek", "parsed"), "is not supported; use include_reasoning"),
    "regex": ((), "is not supported; use response_format"),
    "repeat_penalty": ((1,), "is not known here; use repetition_penalty"),
    "repetition_detection": ((), "is not supported"),
    "samplers": ((), "is not supported; they are applied in one order"),
    "separate_reasoning": ((True,), "is not supported; use include_reasoning"),
    "smoothing_factor": ((0,), "is not supported; use temperature"),
    "stop_regex": (([], ""), "is not supported; use stop"),
    "stop_sequences": (([],), "is not known here; use stop"),
    "suffix": (("",), "is not supported; this server continues text"),
    "t_max_predict_ms": ((-1, 0), "is not supported; limit the tokens"),
    "text": (({"format": {"type": "text"}},), "is not known here; use response_format, or /v1/responses"),
    "tfs_z": ((1, 1.0), "is not supported; use top_p or min_p"),
    "thinking": ((), "is not known here; use enable_thinking, or /v1/messages"),
    "thinking_budget": ((), "is not supported; use max_tokens"),
    "thinking_budget_tokens": ((-1,), "is not supported; use max_tokens"),
    "thinking_token_budget": ((), "is not supported; use max_tokens"),
    "top_a": ((0,), "is not supported; use top_p or min_p"),
    "top_n_sigma": ((-1, 0), "is not supported; use top_p or min_p"),
    "truncation": (("disabled",), "is not known here; use truncate_prompt_tokens"),
    "typical": ((1,), "is not supported; use top_p or min_p"),
    "typical_p": ((1, 1.0), "is not supported; use top_p or min_p"),
    "use_beam_search": ((False,), "is not supported; ask for n answers and choose"),
    "web_search_options": ((), "is not supported; the server has no network access"),
    "xtc_probability": ((0,), "is not supported; use top_p or min_p"),
}
"""Fields that would change the output and cannot be honoured: neither by completions nor by chats."""

_CONVERSATIONS = f"is for conversations; use {CHAT}"

COMPLETION_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "add_generation_prompt": ((), _CONVERSATIONS),
    "chat_template_kwargs": (({},), _CONVERSATIONS),
    "continue_final_message": ((False,), _CONVERSATIONS),
    "enable_thinking": ((), _CONVERSATIONS),
    "include_reasoning": ((True,), _CONVERSATIONS),
    "input": (("", []), "is not known here; use prompt"),
    "instructions": (("",), "is for conversations; put them into the prompt"),
    "max_completion_tokens": ((), "is for conversations; use max_tokens"),
    "messages": (([],), _CONVERSATIONS),
    "reasoning_effort": (("none",), _CONVERSATIONS),
    "special_tokens_in_content": ((True,), "is for conversations; give the prompt as token ids"),
    "system": (("", []), "is for conversations; put it into the prompt"),
    "tool_choice": (("none", "auto"), _CONVERSATIONS),
    "tools": (([],), _CONVERSATIONS),
    "top_logprobs": ((0,), "is for conversations; use logprobs"),
    "verbosity": ((), _CONVERSATIONS),
}
"""Fields of other endpoints that completions refuse besides, in the same form."""

CHAT_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "echo": ((False,), f"is for completions; use {COMPLETIONS}, or continue_final_message"),
    "input": (("", []), "is not known here; use messages"),
    "instructions": (("",), "is not known here; use a message of the role system"),
    "prompt": (("", []), f"is for completions; use messages, or {COMPLETIONS}"),
    "system": (("", []), "is not known here; use a message of the role system"),
}
"""Fields of other endpoints that chats and /tokenize refuse besides, in the same form."""


def refuse_unsupported(body: BaseModel, **neutral: object) -> None:
    """Refuse fields that would change the output and cannot be honoured.

    `neutral` are further values, by field, that change nothing.
    """
    elsewhere = COMPLETION_UNSUPPORTED if isinstance(body, CompletionBody) else CHAT_UNSUPPORTED
    for name, value in (body.model_extra or {}).items():
        if value is None or (name in neutral and value == neutral[name]):
            continue
        for table in (UNSUPPORTED, elsewhere):
            if name in table and value not in table[name][0]:
                raise unsupported(name, table[name][1])


__all__ = ["CHAT_UNSUPPORTED", "COMPLETION_UNSUPPORTED", "UNSUPPORTED", "refuse_unsupported"]
