"""Seeds of sampled answers."""

from samewise.rl import answer_seed


def test_every_answer_of_every_step_has_a_seed_of_its_own_that_does_not_change() -> None:
    parts = [(0, step, number) for step in range(10) for number in range(10)]
    seeds = [answer_seed(*each) for each in parts]
    assert len(set(seeds)) == len(parts)
    assert seeds == [answer_seed(*each) for each in parts]
    assert all(0 <= seed < 2**53 for seed in seeds)
