"""`samewise audit` and `keygen`: what they print, where, and with which exit code."""

import json

import pytest

from samewise import LLM, SamplingParams
from samewise.receipts import store
from samewise.receipts.signing import SigningKey
from samewise.testing import byte_tokenizer, tiny_model

QUICK = ("--kv-memory", "4MiB")


@pytest.fixture(scope="module")
def receipts(folder):
    """Receipts of two requests with two choices each, nine tokens a choice."""
    params = SamplingParams(temperature=0.9, max_tokens=9, n=2)
    with LLM(folder, device="cpu", kv_memory="4MiB", frame_rows=16, max_model_len=64) as llm:
        outputs = llm.generate(["abc", "def"], params, use_tqdm=False)
        return [receipt for output in outputs for receipt in llm.receipts(output, params)]


def test_a_true_receipt_is_the_same(run, receipts, tmp_path):
    path = store.save(tmp_path, receipts[0])
    result = run("audit", path, *QUICK)
    assert (result.code, result.out) == (0, f"{path}: same (9 tokens, contract {receipts[0].contract.id})\n")


def test_altered_and_unreadable_receipts_are_named(run, receipts, tmp_path):
    for receipt in receipts:
        store.save(tmp_path, receipt)
    altered = json.loads(receipts[0].dumps())
    altered["output"]["token_ids"][3] ^= 1
    (tmp_path / "altered.json").write_text(json.dumps(altered))
    (tmp_path / "torn.json").write_text(receipts[0].dumps()[:100])
    result = run("audit", tmp_path, *QUICK)
    assert result.code == 1
    assert "altered.json: altered" in result.out
    assert "position 3: the receipt says token" in result.out
    assert "torn.json: unreadable" in result.out
    assert result.out.endswith("1 altered, 4 same, 1 unreadable\n")
    result = run("audit", tmp_path, "--json", *QUICK)
    assert len(result.records) == 6
    (finding,) = [record for record in result.records if record["receipt"].endswith("altered.json")]
    assert (finding["status"], finding["position"], finding["num_tokens"]) == ("altered", 3, 9)


def test_another_contract_is_replayed_only_with_force(run, receipts, tmp_path, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    tiny_model(seed=1).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    path = store.save(tmp_path, receipts[0])
    result = run("audit", path, "--model", other, *QUICK)
    assert result.code == 1
    assert "other contract" in result.out
    assert "\n  weights: " in result.out
    assert "\n  probe: " in result.out
    assert "position" not in result.out
    result = run("audit", path, "--model", other, "--force", *QUICK)
    assert result.code == 1
    assert "different" in result.out
    assert "position" in result.out


def test_a_file_without_receipts_is_refused(run, tmp_path):
    result = run("audit", tmp_path / "none.json")
    assert result.code == 2
    assert "is not there" in result.err
    (tmp_path / "x.json").write_text("{}")
    result = run("audit", tmp_path / "x.json")
    assert result.code == 1
    assert "no receipt" in result.out


def test_a_key_accepts_only_receipts_it_signed(run, receipts, tmp_path):
    key = tmp_path / "server.key"
    result = run("keygen", key)
    assert result.code == 0
    assert SigningKey.load(key).public in result.out
    assert run("keygen", key).code == 2
    signed = store.save(tmp_path / "signed", receipts[0].signed(SigningKey.load(key)))
    plain = store.save(tmp_path / "plain", receipts[0])
    assert run("audit", signed, "--key", f"{key}.pub", *QUICK).code == 0
    result = run("audit", plain, "--key", f"{key}.pub", *QUICK)
    assert result.code == 1
    assert "not signed" in result.out
    assert run("audit", plain, "--key", plain).code == 2


def test_a_hidden_prompt_must_be_given(run, folder, tmp_path):
    params = SamplingParams(max_tokens=3)
    with LLM(folder, device="cpu", kv_memory="4MiB") as llm:
        (output,) = llm.generate("abc", params, use_tqdm=False)
        path = store.save(tmp_path, llm.receipts(output, params, hide_prompt=True)[0])
    result = run("audit", path, *QUICK)
    assert result.code == 1
    assert "only its prompt's digest" in result.out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"xyz"\n"abc"\n')
    assert run("audit", path, "--prompts", prompts, *QUICK).code == 0
