"""The replica that has most of a prompt's pages is chosen, unless it is much busier."""

from samewise.scale.prefix_choice import ChoiceLimits, PrefixChoice


def pages(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


def test_the_replica_with_most_pages_comes_first() -> None:
    choice = PrefixChoice()
    choice.sent("a", pages("abcd"))
    choice.sent("b", pages("abxx"))
    idle = {"a": 0, "b": 0, "c": 0}
    assert choice.rank(pages("abcdef"), idle)[0] == "a"
    assert choice.rank(pages("abxyz"), idle)[0] == "b"
    assert choice.num_known("a", pages("abxyz")) == 2
    assert choice.num_known("c", pages("abxyz")) == 0


def test_a_much_busier_replica_is_not_chosen_for_its_pages() -> None:
    choice = PrefixChoice(ChoiceLimits(slack=4, share=0.5))
    choice.sent("a", pages("abcd"))
    assert choice.rank(pages("abcd"), {"a": 4, "b": 0}) == ["a", "b"]
    assert choice.rank(pages("abcd"), {"a": 5, "b": 0}) == ["b", "a"]
    assert choice.rank(pages("abcd"), {"a": 64, "b": 40}) == ["a", "b"]
    assert choice.rank(pages("abcd"), {"a": 65, "b": 40}) == ["b", "a"]


def test_unknown_prompts_go_to_the_least_busy_replica() -> None:
    choice = PrefixChoice()
    choice.sent("a", pages("abcd"))
    assert choice.rank(pages("xyz"), {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert choice.rank([], {"a": 2, "b": 1}) == ["b", "a"]


def test_a_replica_that_was_lost_comes_last() -> None:
    choice = PrefixChoice()
    choice.sent("a", pages("abcd"))
    assert choice.rank(pages("abcd"), {"a": 0, "b": 30, "c": 20}, ("a",)) == ["c", "b", "a"]
    assert choice.rank(pages("abcd"), {"a": 0}, ("a",)) == ["a"]


def test_the_oldest_pages_are_forgotten_tails_first() -> None:
    choice = PrefixChoice(ChoiceLimits(pages=4))
    choice.sent("a", pages("abc"))
    choice.sent("a", pages("xy"))
    assert choice.num_known("a", pages("xy")) == 2
    assert choice.num_known("a", pages("abc")) == 2
    choice.keep(["b"])
    assert choice.num_known("a", pages("xy")) == 0


def test_a_replica_that_reports_nothing_is_as_busy_as_its_router_knows() -> None:
    choice = PrefixChoice(ChoiceLimits(slack=4, share=0.5))
    choice.sent("a", pages("abcd"))
    assert choice.rank([], {"a": None, "b": 1}, own={"a": 12}) == ["b", "a"]
    assert choice.rank(pages("abcd"), {"a": None, "b": None}, own={"a": 12, "b": 1}) == ["b", "a"]
    assert choice.rank([], {"a": 1, "b": 3}, own={"a": 12}) == ["b", "a"]  # the report is older
    assert choice.rank([], {"a": 20, "b": 13}, own={"a": 12}) == ["b", "a"]  # other routers' requests
