"""Tuned tables: they build ladders, and a bad one is refused with its name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastlayers import env, tuning
from fastlayers.device import DESCRIBED
from fastlayers.registry import Backend, Registry
from fastlayers.tuning import ladder
from fastlayers.tuning.staleness import kernel_hash, packages_of

H200 = DESCRIBED["H200"]


@dataclass(frozen=True)
class Config:
    n: int

    def tuning_key(self) -> str:
        return f"N={self.n}"


class Impl:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg


def table() -> Registry:
    return Registry("toy", [Backend("a", Impl), Backend("b", Impl), Backend("c", Impl, weight_layout="other")])


def write(folder: Path, **changes: object) -> Path:
    rows = [
        {"max_tokens": 16, "backend": "b", "microseconds": 3.5},
        {"max_tokens": 64, "backend": "c", "microseconds": 3.0},
        {"max_tokens": None, "backend": "a", "microseconds": 9.0},
    ]
    path = folder / "toy" / "N=8,device_name=H200.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "layer": "toy", "device": "H200", "ladder": rows} | changes))
    return path


def test_table_builds_a_ladder_over_one_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    write(tmp_path)
    choice = table().choose(Config(8), H200)
    assert choice.name == "b:16|a" and "N=8,device_name=H200.json" in choice.evidence
    assert [rung.microseconds for rung in choice.rungs] == [3.5, 9.0]
    cut = "without its rungs of c: another weight layout"
    assert choice.evidence == f"tuned table N=8,device_name=H200.json; {cut}"


def test_what_cannot_run_is_dropped_and_the_last_rung_has_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    rows = [
        {"max_tokens": 16, "backend": "b", "microseconds": 3.5},
        {"max_tokens": None, "backend": "a", "microseconds": 9.0},
    ]
    here = Registry("toy", [Backend("a", Impl, ("no_such_package",)), Backend("b", Impl)])
    write(tmp_path, ladder=rows)
    choice = here.choose(Config(8), H200)
    assert choice.name == "b" and choice.rungs[0].microseconds is None
    assert choice.evidence.endswith("; without its rungs of a: it cannot run here")
    assert "no_such_package is not installed" in choice.refused["a"]
    write(tmp_path, ladder=rows, measured=[{"tokens": n, "backend": "b", "us": 3.5 * n} for n in (1, 512)])
    assert here.choose(Config(8), H200).rungs[0].microseconds == 3.5 * 512


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"layer": "other"},
        {"device": "A100"},
        {"ladder": []},
        {"key": "N=9"},
        {"ladder": [{"max_tokens": -3, "backend": "b"}, {"max_tokens": None, "backend": "a"}]},
        {"ladder": [{"max_tokens": True, "backend": "b"}, {"max_tokens": None, "backend": "a"}]},
        {"ladder": [{"max_tokens": None, "backend": "a", "microseconds": -1.0}]},
        {"ladder": [{"max_tokens": None, "backend": "a", "microseconds": "9"}]},
        {"ladder": [{"max_tokens": None, "backend": "a", "microseconds": True}]},
        {"ladder": [{"max_tokens": None, "backend": "a", "config": {"BLOCK": 16}}]},
        {"ladder": [{"max_tokens": 8, "backend": "a"}]},
        {"ladder": [{"max_tokens": 8}, {"max_tokens": None, "backend": "a"}]},
        {"ladder": [{"max_tokens": 8, "backend": ["a"]}, {"max_tokens": None, "backend": "a"}]},
        {
            "ladder": [
                {"max_tokens": 9, "backend": "a"},
                {"max_tokens": 8, "backend": "b"},
                {"max_tokens": None, "backend": "a"},
            ]
        },
    ],
)
def test_bad_tables_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    path = write(tmp_path, **changes)
    with pytest.raises(tuning.TunedTableError, match=path.name.replace("=", ".")):
        table().choose(Config(8), H200)


def test_every_shipped_table_passes_the_checks() -> None:
    found = [(path.parent.name, path) for path in tuning.SHIPPED.glob("*/*.json")]
    read = [tuning.read(path, layer, DESCRIBED[path.stem.rpartition("device_name=")[2]]) for layer, path in found]
    assert len(read) > 20 and all(table["key"] in path.name for table, (_, path) in zip(read, found, strict=True))


def test_corrupt_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    write(tmp_path).write_text("{not json")
    with pytest.raises(tuning.TunedTableError, match="corrupt"):
        table().choose(Config(8), H200)


# ---- the nearest shape -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A configuration with two sizes and a format."""

    n: int
    k: int = 64
    fmt: str = "bf16"

    def tuning_key(self) -> str:
        return f"N={self.n},K={self.k},{self.fmt}"


def store(folder: Path, cfg: Shape, backend: str, **changes: object) -> Path:
    measured = [
        {"tokens": 1, "backend": "a", "us": 10.0, "spread_us": 0.1},
        {"tokens": 1, "backend": "b", "us": 12.0, "spread_us": 0.1},
    ]
    found = {
        "schema": 1, "layer": "toy", "device": "H200", "key": cfg.tuning_key(), "measured": measured,
        "ladder": [{"max_tokens": None, "backend": backend, "microseconds": 10.0, "config": {"BLOCK": cfg.n}}],
    }  # fmt: skip
    path = tuning.path_of(folder, "toy", cfg.tuning_key(), H200)
    tuning.write(path, found | changes)
    return path


class Configured(Impl):
    def __init__(self, cfg: object, config: dict[str, int] | None = None) -> None:
        self.cfg, self.config = cfg, config


def shapes() -> Registry:
    return Registry("toy", [Backend("a", Configured), Backend("b", Configured)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    monkeypatch.setattr(ladder, "_announced", set())
    return tmp_path


@pytest.mark.parametrize(
    ("key", "other", "far"),
    [
        ("N=8,K=64,bf16", "N=8,K=64,bf16", 0.0),
        ("N=8,K=64,bf16", "N=16,K=16,bf16", 3.0),
        ("N=8,K=64,bf16", "N=8,K=64,fp8", None),
        ("N=8,K=64,bf16", "N=8,K=64", None),
        ("N=8,K=64,bf16", "K=8,N=64,bf16", None),
        ("N=8,block=128x128", "N=9,block=64x128", None),
        ("N=0", "N=1", None),
    ],
)
def test_distance_is_in_doublings_of_the_numbers(key: str, other: str, far: float | None) -> None:
    assert tuning.distance(key, other) == far == tuning.distance(other, key)


def test_the_nearest_shapes_ladder_serves_and_one_line_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store(folder, Shape(8), "a")
    store(folder, Shape(1000), "b")
    store(folder, Shape(500, fmt="fp8"), "a")
    choice = shapes().choose(Shape(400), H200)
    assert choice.name == "b" and choice.build().single.config == {"BLOCK": 1000}
    assert choice.evidence == "nearest tuned table N=1000,K=64,bf16,device_name=H200.json"
    assert shapes().choose(Shape(9), H200).name == "a"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no tuned table for N=400,K=64,bf16 on H200" in line
    # Neither neighbour's parameters were timed by the other.
    assert "up to 30 %" in line and line.endswith("fastlayers tune --layer toy --shape n=400")
    assert shapes().choose(Shape(400, fmt="int8"), H200).evidence == "rank"
    assert shapes().choose(Shape(400), "A100").evidence == "rank"


class Even(Configured):
    """Whose parameters are for even sizes."""

    @staticmethod
    def fits(cfg: Shape, config: dict[str, int]) -> bool:
        return cfg.n % 2 == 0


def test_what_is_lent_to_a_shape_that_it_does_not_fit_runs_by_the_rule(folder: Path) -> None:
    store(folder, Shape(8), "a")
    here = Registry("toy", [Backend("a", Even), Backend("b", Configured)])
    odd, even = (here.choose(Shape(n), H200) for n in (9, 10))
    assert odd.name == even.name == "a" and odd.evidence == even.evidence
    assert (odd.build().single.config, even.build().single.config) == (None, {"BLOCK": 8})
    # Those of a backend that says nothing, and the shape's own.
    assert shapes().choose(Shape(9), H200).build().single.config == {"BLOCK": 8}
    assert here.choose(Shape(8), H200).build().single.config == {"BLOCK": 8}


class Small(Configured):
    """Whose parameters, measured elsewhere, are for small sizes."""

    @staticmethod
    def suits(cfg: Shape, config: dict[str, int]) -> bool:
        return cfg.n < 100


def test_what_is_lent_to_a_shape_that_it_does_not_suit_runs_by_the_rule(folder: Path) -> None:
    store(folder, Shape(800), "a")
    here = Registry("toy", [Backend("a", Small), Backend("b", Configured)])
    large, small, own = (here.choose(Shape(n), H200).build().single.config for n in (900, 90, 800))
    # Its own were measured: nobody asks whether they suit.
    assert (large, small, own) == (None, {"BLOCK": 800}, {"BLOCK": 800})


def test_a_neighbour_that_cannot_run_here_is_passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"tokens": 1, "backend": "a", "us": 10.0, "config": {"BLOCK": 8}},
        {"tokens": 1, "backend": "absent", "us": 1.0},
    ]
    store(folder, Shape(8), "a", measured=rows)
    store(folder, Shape(16), "a", measured=rows)
    store(folder, Shape(400), "absent")
    here = Registry("toy", [Backend("absent", Configured, ("no_such_package",)), *shapes().ranked])
    choice = here.choose(Shape(500), H200)
    assert choice.name == "a" and choice.evidence == "nearest tuned table N=16,K=64,bf16,device_name=H200.json"
    # The same for a shape whose own table cannot run.
    assert here.choose(Shape(400), H200).evidence.startswith("nearest tuned table N=16,")
    # What "absent" took is no measure of what this choice costs: "a" is within 30 % of the best that runs.
    (line,) = [record.getMessage() for record in caplog.records]
    assert "up to 30 %" in line


def test_an_unknown_backend_is_refused_by_name(folder: Path) -> None:
    from fastlayers.linear.fp8_block.layer import FP8_LINEAR, FP8LinearConfig

    cfg = FP8LinearConfig(256, 128)
    path = tuning.path_of(folder, "fp8_linear", cfg.tuning_key(), H200)
    rows = [{"max_tokens": 8, "backend": "tritn"}, {"max_tokens": None, "backend": "triton"}]
    tuning.write(path, {"schema": 1, "layer": "fp8_linear", "device": "H200", "ladder": rows})
    with pytest.raises(
        tuning.TunedTableError, match=r"N=128,K=256.*'tritn' is unknown; known: .*triton.* remove the file"
    ):
        FP8_LINEAR.choose(cfg, H200)


def test_a_borrowed_configuration_that_was_not_timed_counts_as_slow(folder: Path) -> None:
    store(folder, Shape(8), "a")
    store(folder, Shape(16), "b")
    # "a" takes 10 µs by its own rule and "b" 12: the neighbour's BLOCK was timed by neither.
    assert tuning.borrowed_ratios("toy", H200) == {"N=8,K=64,bf16": [1.3], "N=16,K=64,bf16": [1.3]}
    rows = [
        {"tokens": 1, "backend": "a", "us": 10.0, "spread_us": 0.1},
        {"tokens": 1, "backend": "b", "us": 11.0, "spread_us": 0.1, "config": {"BLOCK": 16}},
    ]
    store(folder, Shape(8), "a", measured=rows)
    assert tuning.borrowed_ratios("toy", H200)["N=8,K=64,bf16"] == [1.1]
    assert [path.name for path in tuning.tables("toy", H200)] == [
        "N=16,K=64,bf16,device_name=H200.json", "N=8,K=64,bf16,device_name=H200.json"
    ]  # fmt: skip


def test_a_corrupt_neighbour_is_refused_by_name(folder: Path) -> None:
    store(folder, Shape(8), "a").write_text("{")
    with pytest.raises(tuning.TunedTableError, match="N=8"):
        shapes().choose(Shape(9), H200)


@pytest.mark.parametrize(
    "changes",
    [
        {"measured": [{"tokens": 1, "backend": "a"}]},
        {"measured": [{"tokens": 1, "backend": "a", "us": 0}]},
        {"metadata": []},
        {"metadata": {"versions": 3}},
        {"metadata": {"versions": {"a": "1.0"}}},
        {"metadata": {"versions": ["a"]}},
        {"metadata": {"kernels": ["a"]}},
        {"measured": [{"tokens": "1", "backend": "a", "us": 1.0}]},
        {"candidates": 3},
    ],
)
def test_bad_measurements_are_refused_by_name(folder: Path, changes: dict[str, object]) -> None:
    path = store(folder, Shape(8), "a", **changes)
    with pytest.raises(tuning.TunedTableError, match=path.name.replace("=", ".")):
        shapes().choose(Shape(8), H200)


# ---- what a table depends on -----------------------------------------------------------------------------------


def test_a_table_of_other_versions_is_used_and_marked(folder: Path) -> None:
    about = tuning.metadata("toy", shapes().ranked)
    assert set(about["versions"]["a"]) == {"torch"} and about["kernels"]["a"] == about["kernels"]["b"]
    store(folder, Shape(8), "a", metadata=about)
    assert shapes().choose(Shape(8), H200).evidence == "tuned table N=8,K=64,bf16,device_name=H200.json"
    other = about | {"versions": {"a": {"torch": "1.0"}, "b": {"torch": "0.1"}}, "kernels": {"a": "0"}}
    store(folder, Shape(8), "a", metadata=other)
    choice = shapes().choose(Shape(8), H200)
    # What only "b" depends on does not matter: the ladder is "a".
    assert choice.name == "a" and "made with other versions (torch 1.0, now " in choice.evidence
    assert "kernels of a have changed" in choice.evidence and "0.1" not in choice.evidence


def test_kernel_hashes_see_code_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return kernel_hash(f"{name}:Thing")

    plain = hashed("hashed_one", "def f(x):\n    return x + 1\n")
    assert (
        hashed("hashed_two", '"""Text."""\n\n\ndef f(x):\n    """Wörds\n    # more."""\n    return  x + 1  # «why»\n')
        == plain
    )
    # The same digits on every version of Python: tables travel.
    assert plain == "334b6bf70599"
    assert hashed("hashed_three", "def f(x):\n    return x + 2\n") != plain
    assert kernel_hash("fastlayers.linear.fp8_block.triton:TritonFP8Linear") != plain


def test_packages_behind_a_backend() -> None:
    needs = ("triton:jit", "triton.language:dot", "sgl_kernel", "torch.ops:sgl_kernel.rmsnorm")
    assert packages_of(Backend("x", Impl, needs)) == ("triton", "sgl_kernel")
    assert packages_of(Backend("x", Impl)) == ("torch",)


def test_kernel_hashes_are_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.tuning import staleness

    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    target, parsed, sources = "fastlayers.linear.fp8_block.triton:TritonFP8Linear", [], staleness.installed()
    right = sources.kernel_hash(target)

    class Counting:
        def kernel_hash(self, target: str) -> str:
            parsed.append(target)
            return right

    monkeypatch.setattr(staleness, "installed", Counting)

    def in_another_process() -> str:
        staleness._hash.cache_clear()
        staleness._known_hashes.cache_clear()
        return kernel_hash(target)

    try:
        assert [in_another_process() for _ in range(3)] == [right] * 3 and len(parsed) == 1
        (kept,) = tuning.probed_dir().iterdir()
        content = kept.read_text()
        for broken in (content.replace(staleness._files_state(), "other files"), content[:-9], '{"hashes": [3]}'):
            kept.write_text(broken)
            parsed.clear()
            assert in_another_process() == right and len(parsed) == 1 and kept.read_text() == content, broken
        kept.unlink()
        kept.mkdir()
        (kept / "in the way").touch()
        assert in_another_process() == right  # it cannot be kept, and nobody is told: it is right anyway
        assert [path.name for path in tuning.probed_dir().iterdir()] == [kept.name]
    finally:
        staleness._hash.cache_clear()
        staleness._known_hashes.cache_clear()
