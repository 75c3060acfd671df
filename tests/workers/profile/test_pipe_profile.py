"""What a profile says about its figures."""

import json
from typing import Any

import pytest

from torchdata_wds.workers.profile.pipe_profile import PipeProfile, StageProfile, WorkersProfile

STAGES = (
    StageProfile("load_wds_shards().group_by_key()", 640, 0.2, 0.15, 0.19, 0.0003125, 3_200.0, False),
    StageProfile("wds_decode('rgb8')", 640, 0.75, 0.0, 0.71, 0.00117, 674.0, False),
    StageProfile("batch(64)", 10, 0.1, 0.0, 0.09, 0.01, 9.5, True),
)


def run_of(workers: int, rate: float, memory: int | None = 250_000_000, others: float | None = None) -> WorkersProfile:
    """A run of two seconds."""
    return WorkersProfile(workers, round(2 * rate), 2.0, rate, 0.25, 0.9, others, 200_000_000, None, memory)


def profile_of(*runs: WorkersProfile, **options: Any) -> PipeProfile:
    """A profile with these runs."""
    return PipeProfile(2, 10.0, 64.0, STAGES, 0.02, runs, **options)


@pytest.mark.parametrize(
    ("rates", "step_rate", "expected"),
    [
        ((), None, "wds_decode('rgb8') takes 71% of the time."),
        (
            (10, 9.8, 18, 19),
            None,
            "wds_decode('rgb8') takes 71% of the time; 1 worker gives 0.98 x, 2 give 1.8 x, 4 give 1.9 x the rate of "
            "none, on 2 processors. 2 workers are enough.",
        ),
        (
            (10, 9.8),
            5,
            "wds_decode('rgb8') takes 71% of the time; 1 worker gives 0.98 x the rate of none, on 2 processors. "
            "No workers are needed for the step: the loader makes 2 x what it takes.",
        ),
        (
            (10, 15, 18),
            12,
            "wds_decode('rgb8') takes 71% of the time; 1 worker gives 1.5 x, 2 give 1.8 x the rate of none, on 2 "
            "processors. 1 worker is enough for the step: the loader makes 1.2 x what it takes.",
        ),
        (
            (10, 9.8),
            9.9,
            "wds_decode('rgb8') takes 71% of the time; 1 worker gives 0.98 x the rate of none, on 2 processors. "
            "Workers do not make it faster. With no worker, the loader makes 1 x what the step takes.",
        ),
        (
            (10, 18),
            36,
            "wds_decode('rgb8') takes 71% of the time; 1 worker gives 1.8 x the rate of none, on 2 processors. "
            "More workers may be faster still. With 1 worker, the loader makes 0.5 x what the step takes: training "
            "waits for data.",
        ),
    ],
)
def test_the_judgement_names_the_slowest_stage_and_what_workers_give(
    rates: tuple[float, ...], step_rate: float | None, expected: str
) -> None:
    """The fewest workers that are about as fast as the fastest are enough, and the step is compared with them."""
    runs = [run_of(workers, rate) for workers, rate in zip((0, 1, 2, 4), rates, strict=False)]
    assert profile_of(*runs, step_rate=step_rate).judgement() == expected


def words(line: str) -> str:
    """A line of a table without its padding."""
    return " ".join(line.split())


def test_the_report_has_a_row_for_each_stage_and_run() -> None:
    """Numbers have units; the share of reading is shown where it matters."""
    lines = profile_of(run_of(0, 10), run_of(2, 18)).report().splitlines()
    assert words(lines[1]) == "load_wds_shards().group_by_key() 312 us 19% 75% 3,200/s"
    assert lines[3].startswith("batch(64) (thread)")
    assert words(lines[4]) == "(the loader itself) 2%"
    assert words(lines[6]) == "workers items/s samples/s first item processors memory"
    assert words(lines[8]) == "2 18 1,152 250 ms 0.9 250.0 MB"


def test_other_programs_are_named_if_they_disturb() -> None:
    """A quarter of the processors, on average over the runs."""
    quiet, busy = (profile_of(run_of(0, 10, others=others), run_of(1, 10)).judgement() for others in (0.4, 0.6))
    assert "Other programs" not in quiet
    assert busy.endswith("Other programs kept 0.6 processors busy meanwhile: the rates are lower than they could be.")


def test_what_the_system_does_not_tell_is_left_out() -> None:
    """Without its column, or as a dash."""
    report = profile_of(run_of(0, 10, None)).report()
    assert "200.0 MB" in report
    assert "largest worker" not in report


def test_plain_values_are_those_of_json() -> None:
    """With what follows from the figures."""
    plain = json.loads(json.dumps(profile_of(run_of(0, 10), step_rate=5.0).to_plain()))
    assert plain["headroom"] == 2
    assert plain["runs"][0]["rate"] == 10
    assert plain["judgement"].startswith("wds_decode")
