"""What ``renew.py`` can renew: each part's command, what it needs, its result and the target that it answers.

In a command, ``{out}`` is the part's result file and ``{dir}`` the folder around it, ``{workers}`` how many processes a
suite may have. The first word is a program of the repository, ``fastlayers``, ``pytest``, or ``ranks`` before a program
that runs once a GPU. A part without ``{out}`` and ``{dir}`` prints its result: the JSON lines are kept. Several parts
may share a result file: each replaces its own rows there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Import names. Their first calls compile for a minute, so parts that are about something else do without.
PACKAGES = ("deep_gemm", "flashinfer", "sgl_kernel")
SERVER = ("aiohttp", "httptools", "msgspec", "prometheus_client", "pydantic", "starlette", "uvicorn", "zmq")
PLAIN = (("FASTLAYERS_DISABLE", ",".join(PACKAGES)),)
ALONE = (("FASTLAYERS_DISABLE", ",".join((*PACKAGES, "flash_attn_interface", "triton_kernels"))),)
MODELS = ("qwen3_8b", "qwen3_30b_a3b", "gpt_oss_20b")
SERVED = {"qwen3_8b": "Qwen/Qwen3-8B", "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B", "gpt_oss_20b": "openai/gpt-oss-20b"}


@dataclass(frozen=True)
class Part:
    """One command and its result.

    Parameters
    ----------
    result : str
        Below benchmarks/results; ``""``: only whether it ends well counts; ``tuned/LAYER``: tables.
    seconds : int
        Expected, until one was adopted.
    target : str
        What it answers: issue, section or row.
    needs : tuple of str
        Import names without which it is left out.
    wide : bool
        It has a worker for each core, which are dealt out to all GPUs that there are (``tests/conftest.py``).
    noisy, quiet : bool
        It keeps all of the host's cores busy; it measures the host's time. One does not run beside the other.
    """

    name: str
    command: str
    result: str
    seconds: int
    target: str
    needs: tuple[str, ...] = ()
    gpus: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    wide: bool = False
    noisy: bool = False
    quiet: bool = False

    @property
    def on_page(self) -> bool:
        """Whether docs/performance.md is made of its result."""
        return self.result.startswith("performance/")


def _single() -> Iterator[Part]:
    """Whole models on one GPU: what issue 10's page and issue 16's table say first."""
    for model, took in zip(MODELS, (30, 30, 25), strict=True):
        needs = ("triton_kernels",) if model == "gpt_oss_20b" else ()
        command = f"benchmarks/generate.py {model} --repeats 2 --out {{out}}"
        yield Part(f"generate.{model}", command, "performance/generate.jsonl", took, "16: rows 1-3; 10: 2", needs)
    for model, took in zip(MODELS, (36, 38, 36), strict=True):
        needs = ("triton_kernels",) if model == "gpt_oss_20b" else ()
        flags = "--ways captured uncaptured --repeats 5 --shapes 1x16 1x128 1x512 32x512"
        command = f"benchmarks/first_token.py {model} {flags} --out {{out}}"
        yield Part(
            f"first_token.{model}", command, "performance/time_to_first_token.jsonl", took, "10: section 2", needs
        )
    for model in MODELS:
        command = f"benchmarks/host_time.py {model} --out {{out}}"
        yield Part(
            f"host_time.{model}", command, "performance/host_time.jsonl", 18, "10: section 1, 16 tokens", quiet=True
        )
    for model, took in (("qwen3_8b", 35), ("gpt_oss_20b", 30), ("deepseek_v3_slice", 27), ("qwen3_30b", 30)):
        command = f"benchmarks/host_time.py {model} --patch --out {{out}}"
        target = "10: section 1, patch without graphs; 12"
        yield Part(f"patch_plain.{model}", command, "performance/host_time.jsonl", took, target, quiet=True)
    for model, batches, took in (("qwen3_8b", "1", 80), ("qwen3_30b", "1 16", 122)):
        # Patched without graphs: patch_plain.
        variants = "--variants stock stock_best graph overlap"
        command = f"benchmarks/patch_gpu.py --model {model} --batch {batches} {variants} --json {{out}}"
        result, target = f"performance/patch_{model}.jsonl", "16: row 9; 12: rows 5"
        yield Part(f"patch_{model}", command, result, took, target, quiet=True)
    for model, batches, took in (("qwen3_8b", "1", 40), ("qwen3_30b", "1 16", 60)):
        flags = f"--model {model} --batch {batches} --variants graph overlap --rounds 3"
        command = f"benchmarks/patch_gpu.py {flags} --json {{out}}"
        yield Part(f"patch_replays.{model}", command, "patch_replays_h200.jsonl", took, "16: row 9, replays alone")
    for model, took in (("qwen3_8b", 33), ("qwen3_30b", 47)):
        shapes = "1x16 1x128 1x512 1x2048 1x8192"
        command = f"benchmarks/patch_first_token.py --model {model} --repeats 4 --shapes {shapes} --out {{out}}"
        yield Part(f"patch_first_token.{model}", command, "performance/patch_first_token.jsonl", took, "10: section 2")


def _served() -> Iterator[Part]:
    """Servers over HTTP on one GPU."""
    # Without the packages that compile for a minute. Triton's kernels take up to 50 seconds, 2,000 arrivals come in 53,
    # 50 and 34. Who compiled starts again, in 20 seconds more.
    for model, took in zip(MODELS, (160, 108, 145), strict=True):
        needs = (*SERVER, *(("triton_kernels",) if model == "gpt_oss_20b" else ()))
        command = (
            f"benchmarks/serve_rows.py {SERVED[model]} --seconds {took + 70} --arrivals 2000 --log {{dir}}/server.log "
            "--out {out}"
        )
        result, target = "performance/serve.jsonl", "13: rows 1-5, 7"
        yield Part(f"serve.{model}", command, result, took, target, needs, 1, PLAIN, quiet=True)
    command = "benchmarks/serve_rows.py Qwen/Qwen3-8B --switches --seconds 165 --log {dir}/server.log --out {out}"
    yield Part("serve.switches", command, "performance/serve.jsonl", 170, "13: row 9", SERVER, 1, PLAIN, quiet=True)
    flags = "--switches lookup --seconds 370"
    command = f"benchmarks/serve_rows.py Qwen/Qwen3-8B {flags} --log {{dir}}/server.log --out {{out}}"
    target = "13: row 6, drafts where they do not help"
    yield Part("serve.lookup", command, "performance/serve.jsonl", 240, target, SERVER, 1, PLAIN, quiet=True)
    command = "benchmarks/speculation.py Qwen/Qwen3-8B --batch 1 8 --trees 9 33 --kernels 14 --out {out}"
    yield Part(
        "speculation", command, "speculation_h200.jsonl", 85, "13: row 6, the verifying step", ("msgspec",), 1, PLAIN
    )
    # An engine a way, whose steps are all captured; of other models' drafts nothing is asked.
    command = "benchmarks/drafts.py --ways mtp 'mtp, tree' 'mtp, rejection' --seconds 110 --out {out}"
    yield Part("drafts", command, "drafts_h200.jsonl", 80, "15: row 61", ("msgspec",), 1, PLAIN)
    command = (
        "benchmarks/soak.py Qwen/Qwen3-8B --requests 10000 --seconds 100 --grammars --out {out} -- "
        "--load-format dummy --seed 0 --max-model-len 512"
    )
    needs = (*SERVER, "xgrammar")
    yield Part("soak", command, "soak_h200.json", 150, "13: soak of 10,000 requests", needs, 1, PLAIN)
    command = "benchmarks/deterministic.py --out {out}"
    yield Part("deterministic", command, "deterministic_h200.jsonl", 100, "13: item 6, which repeat", ("msgspec",))


def _starts() -> Iterator[Part]:
    """First uses, and shapes that no table holds: they need all packages."""
    for model, took in (("qwen3_8b", 116), ("qwen3_30b_a3b", 120)):
        command = f"benchmarks/cold_start.py {model} --out {{out}}"
        yield Part(
            f"cold_start.{model}", command, "performance/cold_start.jsonl", took, "10: section 3", PACKAGES, noisy=True
        )
    for layer, took in (("linear", 150), ("gqa", 150), ("fp8_linear", 200), ("fused_moe", 240)):
        command = f"benchmarks/untuned_shapes.py --layers {layer} --shapes 16 --out {{out}}"
        needs = () if layer in ("linear", "gqa") else PACKAGES
        yield Part(f"untuned_shapes.{layer}", command, "untuned_shapes_h200.jsonl", took, "10: section 4", needs)
    for model, took in zip(MODELS, (35, 45, 40), strict=True):
        command = f"benchmarks/generate.py {model} --repeats 2 --out {{out}}"
        result = "performance/generate_alone.jsonl"
        yield Part(f"generate_alone.{model}", command, result, took, "16: row 10, no package", environment=ALONE)
    command = "benchmarks/generate.py qwen3_30b_a3b --no-decode --capture --objects 5000000 --out {out}"
    yield Part("capture", command, "performance/capture.jsonl", 45, "15: rows 54, 56", environment=PLAIN, quiet=True)
    command = "benchmarks/generate.py qwen3_30b_a3b --no-decode --out {out}"
    yield Part("import_to_token", command, "performance/first_token.jsonl", 25, "10: import to first token")


def _suites() -> Iterator[Part]:
    """What must pass, and how far from fp32 the formats are."""
    suite = "--tb=short --show-capture=no -p no:cacheprovider --summary {out}"
    # Only files that have such tests: others import what a machine with a GPU may not have.
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in files if re.search(r"\bmark\.gpu\b", (ROOT / file).read_text())]
    files.sort(key=lambda file: "warmup" not in file)  # what compiles most begins first
    parity = "tests/test_parity.py"
    others = " ".join(file for file in files if file != parity)
    for name, paths, took, needs, disabled in (
        ("gpu_suite", others, 260, (), PLAIN), ("gpu_parity", parity, 360, PACKAGES, ()),
        ("gpu_parity_alone", parity, 360, (), PLAIN),
    ):  # fmt: skip
        command = f"pytest {paths} -m gpu -n {{workers}} --dist worksteal {suite}"
        target = "10, 15, 16: the GPU suite"
        yield Part(
            name, command, f"{name}.json", took, target, ("xdist", *needs), environment=disabled, wide=True, noisy=True
        )
    for name, those, took in (
        ("multigpu_suite", ("two_gpus", "world"), 130), ("multigpu_faults", ("gpu_faults", "gpu_replays"), 160)
    ):  # fmt: skip
        between = " ".join(f"tests/comm/test_{file}.py" for file in those)
        yield Part(
            name, f"pytest {between} -m multigpu {suite}", f"{name}.json", took, "10: 2; 14: 2", (), 2, PLAIN,
        )  # fmt: skip
    four = " ".join(f"tests/comm/test_{file}.py" for file in ("world", "groups_between_ranks"))
    yield Part(
        "multigpu_four", f"pytest {four} -m multigpu {suite}", "multigpu_four.json", 120, "10: 2; 14: 2, four GPUs", (),
        4, PLAIN,
    )  # fmt: skip
    models = "tests/models/test_models_on_two_gpus.py"
    for name, paths, took in (
        ("multigpu_models", f"{models} tests/models/test_logits_of_two_ranks.py -k 'not sent'", 140),
        ("multigpu_exchange", f"{models} -k sent", 45),
    ):
        yield Part(
            name, f"pytest {paths} -m multigpu {suite}",
            f"{name}.json", took, "14: 2, tokens of whole models", (), 2, PLAIN, noisy=True,
        )  # fmt: skip
    yield Part(
        "multigpu_packages", f"pytest tests/comm/test_two_gpus_packages.py -m multigpu {suite}",
        "multigpu_packages.json", 175, "14: item 1, rows of packages", ("flashinfer", "sgl_kernel"), 2, noisy=True,
    )  # fmt: skip
    checkpoints = (
        ("tiny", "tiny", "mla", "dequantised,fp8-block"),
        ("tiny_qwen3_moe", "checkpoints/tiny_qwen3_moe", "gqa", "dequantised,fp8-block"),
        ("tiny_gpt_oss", "checkpoints/tiny_gpt_oss", "gqa", "mxfp4-dequantised,mxfp4"),
    )
    for name, checkpoint, attention, formats in checkpoints:
        triton = ",".join(f"{layer}=triton" for layer in ("linear", "fp8_linear", "fused_moe", attention, "rms_norm"))
        for backends in ("auto", "triton"):
            command = (
                f"fastlayers eval {checkpoint} --variants hf,patched,fastlayers,{formats},fp8-kv --limit 200 "
                "--stories 60 --hard 60 --device cuda --check --out {out}"
            )
            chosen = (("FASTLAYERS_BACKEND", triton),) if backends == "triton" else ()
            yield Part(
                f"eval.{name}.{backends}", command, f"eval_{name}_{backends}_h200.json", 35,
                "10: 2, accuracy; 15: numbers that tell formats apart", environment=chosen,
            )  # fmt: skip


def _layers() -> Iterator[Part]:
    """Layers against the packages, and optimisations one at a time."""
    points = (
        ("mla.bf16", "mla", "kv_dtype=torch.bfloat16", 90), ("mla.e4m3", "mla", "kv_dtype=torch.float8", 20),
        ("gqa.few_heads", "gqa", "a key head", 5), ("gqa", "gqa", "^(?!.*a key head).*kv_dtype=torch.bfloat16", 95),
        ("gqa.e4m3", "gqa", "kv_dtype=torch.float8", 85), ("small_ops.turns", "small_ops", " ro[tu][at][re][yr] ", 40),
        ("small_ops", "small_ops", "^(?!.* ro[tu][at][re][yr] )", 125), ("fused_moe", "fused_moe", "", 220),
        ("fp8_linear.tp8", "fp8_linear", "DeepSeek-V3 tp8", 160), ("fp8_linear.tp1", "fp8_linear", "tp1", 135),
        ("weight_only", "weight_only", "", 65), ("products", "products", "", 60),
        ("drawn.gqa", "drawn", " gqa ", 150), ("drawn.mla", "drawn", " mla ", 120),
    )  # fmt: skip
    targets = {
        "mla": "16: row 7; 15: row 5",
        "gqa.few_heads": "15: row 22",
        "small_ops.turns": "15: rows 18, 24",
        "fused_moe": "16: rows 6, 8",
        "weight_only": "15: row 26",
        "drawn": "15: 3, ragged batches",
        "products": "15: rows 26, 32, 42, 44, 46, 47",
    }
    for name, part, only, took in points:
        chosen = f" --only '{only}'" if only else ""
        # What is left then makes the part incomplete: no sooner than shortly before it would be ended.
        # Building packages' kernels took three times as long on a host with half of the cores.
        minutes = (2.5 * took + 20) / 60
        command = f"benchmarks/performance.py --part {part} --force --minutes {minutes:.2f} --out {{dir}}{chosen}"
        target = targets.get(name, targets.get(part, "15: never slower, with peers"))
        # Few heads: how near ours comes to the memory's rate, for which packages would be built for each group.
        own = {"weight_only": (), "products": ("deep_gemm", "sgl_kernel"), "gqa.few_heads": ()}
        result = f"{part}_h200.jsonl" if part in (*own, "drawn") else f"performance/{part}.jsonl"
        needs = own.get(name, PACKAGES)
        noisy = bool(needs)  # packages compile on all cores
        yield Part(name, command, result, took + 15, target, needs, 1, () if needs else PLAIN, noisy=noisy)
    for part, took in (("mla", 75), ("gqa", 60), ("fused_moe", 100)):
        command = f"benchmarks/performance.py --part {part} --force --minutes {1.5 * took / 60:.1f} --out {{dir}}"
        target = "16: rows 6-8, 10, no package"
        yield Part(f"{part}_alone", command, f"performance/{part}_alone.jsonl", took + 15, target, environment=ALONE)
    others = (
        ("several_tokens", "benchmarks/several_tokens.py tree", "trees_h200", 50, "15: rows 7, 61", ()),
        ("flashmla", "benchmarks/several_tokens.py flashmla", "flashmla_h200", 55, "15: row 7", ("sgl_kernel",)),
        ("mla_paths", "benchmarks/mla_paths.py", "mla_paths_h200", 60, "15: rows 11, 13", ()),
        ("gated", "benchmarks/gated.py", "gated_h200", 35, "15: rows 40, 46", ()),
        ("systems", "benchmarks/systems.py", "systems_h200", 45, "15: rows 19, 32, 35", ()),
        ("slice", "benchmarks/slice.py", "slice_h200", 75, "15: rows 5, 62", ()),
    )  # fmt: skip
    for name, command, file, took, target, needs in others:
        # What a program leaves out is not adopted: it goes on for as long as a part may take.
        command = f"{command} --seconds {1.5 * took:.0f} --out {{out}}"
        yield Part(name, command, f"{file}.jsonl", took, target, needs, 1, PLAIN if not needs else ())
    command, file = "benchmarks/prefix_first_token.py --out {out}", "prefix_first_token_h200.jsonl"
    yield Part("prefix_first_token", command, file, 60, "15: row 13", ("msgspec",), 1, PLAIN)
    for model in ("qwen3_8b", "gpt_oss_20b"):
        command = f"benchmarks/generate.py {model} --bf12 --repeats 2 --max-batch 1 --out {{out}}"
        file = "generate_bf12_h200.jsonl"
        yield Part(f"generate_bf12.{model}", command, file, 45, "16: rows 2, 3", environment=PLAIN)
    for model in MODELS:
        command, file = f"benchmarks/generate.py {model} --repeats 2 --out {{out}}", "generate_wgmma_h200.jsonl"
        yield Part(f"generate_wgmma.{model}", command, file, 17, "16: rows 1-3", environment=PLAIN)
    command = "benchmarks/patch_gpu.py --model qwen3_8b qwen3_30b --variants graph overlap bf12 --json {out}"
    yield Part("patch_bf12", command, "patch_bf12_h200.jsonl", 110, "16: row 9", environment=PLAIN)
    # What packages compile when it is first called takes most of the one; the other compiles Triton's kernels alone.
    for name, flags, took, needs, disabled in (
        ("tp8_layer", " --build", 150, PACKAGES, ()), ("tp8_layer_alone", "", 42, (), ALONE)
    ):  # fmt: skip
        command = f"benchmarks/tp8_layer.py --profile{flags} --seconds {1.5 * took:.0f} --out {{out}}"
        target = "16: rows 4, 5, 7" if needs else "16: rows 4, 5, 7, 10, no package"
        yield Part(name, command, f"performance/{name}.jsonl", took, target, needs, 1, disabled)
    for model in ("deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b"):
        command = f"fastlayers bench ablation {model} --batch 1,32 --context 1024 --json"
        name = f"ablation.{model.partition('/')[2]}"
        yield Part(name, command, "ablation_h200.jsonl", 80, "15: ablation", environment=PLAIN)
    # What came since: a third of the time that all take.
    command = "fastlayers bench ablation deepseek-ai/DeepSeek-V3 --batch 1,32 --context 1024 --items 10,28,40,44 --json"
    yield Part("ablation.since", command, "ablation_h200.jsonl", 35, "15: rows 10, 28, 40, 44, 45", environment=PLAIN)
    command = "fastlayers bench model deepseek-ai/DeepSeek-V3 --layers 6 --batch 1,32 --context 1024 --json"
    yield Part("bench_model", command, "bench_model_h200.jsonl", 55, "15: row 62", environment=PLAIN)
    for model in MODELS:
        command = f"benchmarks/generate.py {model} --repeats 1 --max-batch 256 --also 256 --profile --out {{out}}"
        needs = ("triton_kernels",) if model == "gpt_oss_20b" else ()
        yield Part(f"profile.{model}", command, "profiles_h200.jsonl", 60, "16: a profile of each miss", needs)
    command = "benchmarks/torch_compile.py qwen3_8b"
    yield Part("torch_compile", command, "torch_compile_h200.jsonl", 150, "15: row 55", environment=PLAIN)


def _ranks() -> Iterator[Part]:
    """Two GPUs: issue 14."""
    two = "ranks benchmarks/two_gpus.py"
    decode, slices = "two_gpus_decode_h200.jsonl", "two_gpus_slice_h200.jsonl"
    slice_of = f"{two} models --models deepseek_v3_slice"
    rows = (
        ("two.rows", f"{two} rows --replays 5000", "two_gpus_exchange_h200.jsonl", 30, "14: rows 1, 3, 8"),
        ("two.start", f"{two} start --share 512", "two_gpus_start_h200.jsonl", 13, "14: row 2, kernels cached or not"),
        ("two.start_again", f"{two} start --share 512", "two_gpus_start_h200.jsonl", 13, "14: row 2, kernels cached"),
        ("two.prefill", f"{two} models --seconds 44 --seams '' --batches 1 --prefill 2048 8192",
         "two_gpus_prefill_h200.jsonl", 60, "14: spread steps"),
        ("two.slice_prefill", f"{slice_of} --seconds 60 --seams '' --batches 1 --prefill 2048 8192",
         "two_gpus_prefill_h200.jsonl", 45, "14: FP8 rows between ranks"),
        ("two.decode", f"{two} models --seconds 40 --seams '' late nccl --batches 1 64 128", decode, 80,
         "14: rows 4, 5"),
        ("two.groups", f"{two} models --models qwen3_30b_a3b --dp 2 --ep 2 --requests 2 128 --seconds 40", decode, 40,
         "14: row 6"),
        ("two.slice", f"{slice_of} --seconds 75 --seams '' nccl --batches 1 64", slices, 40, "14: rows 4, 5, slice"),
        # The same requests by groups and by TP2: where the one overtakes the other.
        ("two.slice_groups", f"{slice_of} --dp 2 --ep 2 --requests 2 16 64 128 --prompt 4096 --seconds 90", slices, 75,
         "14: row 6, slice"),
        ("two.slice_beside", f"{slice_of} --seams '' --requests 2 16 64 128 --prompt 4096 --seconds 90", slices, 65,
         "14: row 6, TP2 beside it"),
        ("two.overlap", f"{slice_of} --dp 2 --ep 2 --requests 128 --prompt 512 --overlap off two_batch two_chunk "
         "--seconds 90", "two_gpus_overlap_h200.jsonl", 70, "14: item 6, halves in turns"),
        ("two.profile", f"{two} models --models deepseek_v3_slice qwen3_30b_a3b --seams '' --profile --seconds 45",
         "two_gpus_profiles_h200.jsonl", 70, "14: 3, a profile of each miss"),
        ("two.groups_profile", f"{slice_of} --dp 2 --ep 2 --requests 128 --prompt 4096 --profile --seconds 60",
         "two_gpus_profiles_h200.jsonl", 50, "14: 3, row 6's miss"),
        ("two.beside_profile", f"{slice_of} --seams '' --requests 128 --prompt 4096 --profile --seconds 60",
         "two_gpus_profiles_h200.jsonl", 45, "14: 3, TP2 beside row 6's miss"),
        ("two.replays", f"{two} rows --ways --late --replays 100000", "two_gpus_replays_h200.jsonl", 90, "14: 2"),
        ("two.ways", f"{two} rows --ways --replays 5000", "two_gpus_rows_h200.jsonl", 60, "14: rows 1, 3, ways"),
    )  # fmt: skip
    for name, command, result, took, target in rows:
        yield Part(name, f"{command} --out {{out}}", result, took, target, (), 2, PLAIN)
    command = f"{two} rows --peer --out {{out}}"
    yield Part(
        "two.peer", command, "two_gpus_peer_h200.jsonl", 170, "14: row 1, beside FlashInfer", ("flashinfer",), 2,
        noisy=True,
    )  # fmt: skip
    # Attention of 64 and 128 requests a rank is arithmetic, of which sgl_kernel's FlashMLA does twice as much a second.
    for name, flags in (("groups", "--dp 2 --ep 2"), ("beside", "--seams ''")):
        command = f"{slice_of} {flags} --requests 128 256 --prompt 4096 --profile --seconds 120 --out {{out}}"
        yield Part(
            f"two.flashmla_{name}", command, "two_gpus_flashmla_h200.jsonl", 50, "14: row 6 with a package's attention",
            ("sgl_kernel",), 2, (("FASTLAYERS_DISABLE", "deep_gemm,flashinfer,triton_kernels"),),
        )  # fmt: skip
    command = "ranks benchmarks/eplb.py --out {out}"
    yield Part("eplb", command, "eplb_h200.jsonl", 75, "14: item 5, experts that move", (), 2, PLAIN)
    for name, model, result in (
        ("qwen3_8b", "qwen3_8b", decode), ("qwen3_30b_a3b", "qwen3_30b_a3b", decode),
        ("slice", "deepseek_v3_slice", slices),
    ):  # fmt: skip
        command = f"benchmarks/two_gpus.py models --models {model} --seconds 75 --out {{out}}"
        yield Part(f"one.{name}", command, result, 35, "14: rows 4, 5, one GPU beside", environment=PLAIN)
    command = "benchmarks/two_gpus.py models --models deepseek_v3_slice --profile --seconds 60 --out {out}"
    yield Part("one.profile", command, "two_gpus_profiles_h200.jsonl", 35, "14: 3, one GPU beside", environment=PLAIN)
    # Shapes of two ranks have no tuned tables: a first start probes them for most of a minute.
    for name, flags, gpus, took in (
        ("tp2", "--tp 2 --profile", 2, 170), ("one", "", 1, 93), ("dp2_ep2", "--attn-dp-size 2 --ep 2", 2, 170)
    ):  # fmt: skip
        command = (
            f"benchmarks/serve_rows.py Qwen/Qwen3-30B-A3B --at-once --seconds {took - 5} {flags} "
            "--log {dir}/server.log --out {out}"
        )
        yield Part(
            f"serve_two.{name}", command, "two_gpus_serve_h200.jsonl", took, "14: row 7", SERVER, gpus, PLAIN,
            quiet=True,
        )  # fmt: skip
    command = "fastlayers generate 'What is 127 + 45?' --tp 2 --json"
    yield Part("two.generate", command, "", 35, "14: item 3, the command line", (), 2, PLAIN)


# DeepSeek-V3's experts with the shared one among them.
_SHARED = "D=7168,E=256,top_k=8,num_shared=1,quant=fp8_block,scaling_factor=2.5"

# DeepSeek-V3's latents in e4m3, all heads.
_LATENTS = (
    "num_heads=128,kv_lora_rank=512,qk_rope_head_dim=64,qk_nope_head_dim=128,v_head_dim=128,"
    "softmax_scale=0.1352337788608801,kv_dtype=float8_e4m3fn,lse=False"
)

# Qwen3-30B-A3B's decode: with four heads of keys, requests are as few programs as elsewhere half of them.
_FOUR_HEADS = " ".join(
    f"--shape num_heads=32,num_kv_heads=4,head_dim=128,phase=decode,lse=False,context={context}"
    for context in (4096, 1024, 16384)
)

# Qwen3-30B-A3B's experts as AWQ and GPTQ pack them.
_PACKED = "D=2048,I=768,E=128,top_k=8,quant=w4a16,group_size=128,dtype=bf16"


def _weights_alone(more: str) -> str:
    """Return arguments that tune 4-bit weights at the shapes and rows of performance.py's weight_only."""
    shapes = " ".join(f"--shape N={n},K={k},{more}" for k, n in ((4096, 6144), (12288, 4096), (4096, 24576)))
    return f"--layer weight_only_linear {shapes} --tokens 1,4,16,64,512"


def _tables() -> Iterator[Part]:
    """All ladders that are shipped for the page's device: what they were measured by changes, kernels and packages."""
    tunes = (
        ("mla_tp8", "deepseek-ai/DeepSeek-V3 --tp 8 --layer mla", PACKAGES),
        ("mla_tp8_e4m3", "deepseek-ai/DeepSeek-V3 --tp 8 --kv-dtype e4m3 --layer mla", PACKAGES),
        ("mla_tp1", "deepseek-ai/DeepSeek-V3 --layer mla", PACKAGES),
        ("mla_tp1_e4m3", "deepseek-ai/DeepSeek-V3 --kv-dtype e4m3 --layer mla", PACKAGES),
        ("mla_tp1_e4m3_long", f"--layer mla --shape {_LATENTS},phase=decode,context=65536", PACKAGES),
        ("gqa", "Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B openai/gpt-oss-20b --layer gqa", PACKAGES),
        ("gqa_four_heads", f"--layer gqa {_FOUR_HEADS}", PACKAGES),
        ("gqa_e4m3", "Qwen/Qwen3-8B openai/gpt-oss-20b --kv-dtype e4m3 --layer gqa", PACKAGES),
        ("fused_moe_qwen3_30b", "Qwen/Qwen3-30B-A3B --layer fused_moe", ()),
        ("fused_moe_gpt_oss", "openai/gpt-oss-20b --layer fused_moe", ("triton_kernels",)),
        ("fused_moe_w4a16", f"--layer fused_moe --shape {_PACKED}", ()),
        ("fused_moe_tp8", "deepseek-ai/DeepSeek-V3 --tp 8 --layer fused_moe", PACKAGES),
        ("fused_moe_fp8", "deepseek-ai/DeepSeek-V3 Qwen/Qwen3-30B-A3B-FP8 --layer fused_moe", PACKAGES),
        ("fused_moe_257", f"--layer fused_moe --shape {_SHARED},I=256", PACKAGES),
        ("fused_moe_257_tp1", f"--layer fused_moe --shape {_SHARED},I=2048", PACKAGES),
        ("rms_norm", "Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B openai/gpt-oss-20b --layer rms_norm", ()),
        ("linear", "Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B openai/gpt-oss-20b --layer linear", ()),
        ("linear_deepseek", "deepseek-ai/DeepSeek-V3 --layer linear", ()),
        ("linear_deepseek_tp8", "deepseek-ai/DeepSeek-V3 --tp 8 --layer linear", ()),
        ("fp8_linear_tp8", "deepseek-ai/DeepSeek-V3 --tp 8 --layer fp8_linear", PACKAGES),
        ("fp8_linear_tp1", "deepseek-ai/DeepSeek-V3 Qwen/Qwen3-30B-A3B-FP8 --layer fp8_linear", PACKAGES),
        ("int8_linear", "--layer int8_linear --shape N=2048,K=3072", ("sgl_kernel",)),
        ("weight_only_linear", _weights_alone("zero_point=True"), ()),
        ("weight_only_linear_32", _weights_alone("group_size=32"), ()),
    )
    # FlashInfer builds its kernels meanwhile; 80 seconds measured the first token count, or all but the last.
    more = {"mla_tp8": 160, "mla_tp1": 120, "mla_tp1_e4m3": 120, "mla_tp1_e4m3_long": 45, "gqa": 240,
            "gqa_four_heads": 60, "gqa_e4m3": 160, "fused_moe_gpt_oss": 70, "fused_moe_tp8": 110, "fused_moe_fp8": 300,
            "fused_moe_257": 110, "fused_moe_257_tp1": 110, "fp8_linear_tp8": 200, "fp8_linear_tp1": 250,
            "int8_linear": 45, "weight_only_linear": 60, "weight_only_linear_32": 60}  # fmt: skip
    for name, arguments, needs in tunes:
        layer, seconds = arguments.partition("--layer ")[2].partition(" ")[0], more.get(name, 80)
        command = f"fastlayers tune {arguments} --quick --seconds {1.3 * seconds:.0f} --out {{dir}}"
        yield Part(
            f"retune.{name}", command, f"tuned/{layer}", seconds + 5, "10, 16: stale tables", needs, noisy=bool(needs)
        )
    # Behind the tuner, which times calls alone: which of what is nearly alike is the fastest in whole steps.
    steps = (
        ("qwen3_8b", "8 4 2 16", 85), ("qwen3_8b_32", "32", 75), ("qwen3_8b_1", "1", 40),
        ("qwen3_30b_a3b", "32 1", 95), ("gpt_oss_20b", "32 1", 80), ("gpt_oss_20b_8", "8", 40),
    )  # fmt: skip
    for name, rows, took in steps:
        # Counts of rows with a run of their own: one that is renewed keeps the others.
        model = next(each for each in MODELS if name.startswith(each))
        needs = ("triton_kernels",) if model == "gpt_oss_20b" else ()
        command = f"benchmarks/whole_steps.py {model} --rows {rows} --seconds {took} --out {{out}}"
        target = "10: 2, decode; 16: rows 1-3"
        yield Part(f"whole_steps.{name}", command, "whole_steps_h200.jsonl", took + 5, target, needs, 1, PLAIN)


# What comes first: figures that most targets ask for and that few seconds give; then the rest as it stands.
VALUE = (
    "generate.*", "tp8_layer*", "multigpu_suite", "multigpu_faults", "two.decode", "two.rows", "two.start*",
    "serve_two.tp2", "serve_two.one", "host_time.*", "patch_plain.*", "gpu_*", "first_token.*", "patch_qwen*",
    "mla_alone", "serve.qwen*", "serve.gpt*", "two.slice*", "two.groups", "one.*", "eval.*.auto", "generate_alone.*",
    "two.prefill", "eplb", "capture", "mla.*", "gqa.few_heads", "gqa*", "small_ops.turns", "small_ops",
    "fp8_linear.*", "fused_moe", "cold_start.*", "ablation.*", "speculation", "several_tokens", "weight_only",
    "drafts", "untuned_shapes.*",
)  # fmt: skip


def value(part: Part) -> int:
    """Return a part's place among :data:`VALUE`."""
    return next((place for place, each in enumerate(VALUE) if fnmatchcase(part.name, each)), len(VALUE))


# In the order of value.
PARTS = tuple(sorted((*_single(), *_served(), *_suites(), *_ranks(), *_layers(), *_starts(), *_tables()), key=value))
# Results of GPUs that no part renews, and why.
HISTORY = {
    "bf12_trials_h200.jsonl": "products with weights of 12 bits in whole steps; benchmarks/notes/bf12.md",
    "tp8_layer_gathered_h200.jsonl": "tp8_layer as far as it came, gathered prompts; benchmarks/notes/tp8_layer.md",
    "generate_ladders_h200.jsonl": "newer ladders, Qwen3-8B's of one row mended since; benchmarks/notes/linear.md",
    "prompt_rows_h200.jsonl": "rows around grouped products of a prompt; benchmarks/notes/tp8_layer.md",
    "bf12_rows_h200.txt": "products of 32 rows with weights of 12 bits by wgmma; benchmarks/notes/bf12.md",
    "prompt_activate_h200.jsonl": "activations by blocks of rows and by pairs; benchmarks/notes/tp8_layer.md",
    "mxfp4_rows_h200.jsonl": "experiments with MXFP4 experts; benchmarks/notes/fused_moe_triton.md",
    "mxfp4_trial_h200.jsonl": "candidates for MXFP4 experts by wgmma; benchmarks/notes/fused_moe_triton.md",
    "mla_parts_h200.jsonl": "latents of e4m3 in fp16, and cut by length; benchmarks/notes/mla.md",
    "mla_fp8_heads_h200.jsonl": "latents of e4m3 with 128 heads, warps with a task each; benchmarks/notes/mla.md",
    "few_rows_h200.jsonl": "experiments with products of few rows; benchmarks/notes/linear.md",
    "qwen3_8b_steps_h200.jsonl": "experiments with choices of Qwen3-8B's; benchmarks/notes/linear.md, generate.md",
    "decode_steps.jsonl": "experiments with kernels that were changed for them; benchmarks/notes/decode_phases.md",
    "decode_round4_h200.jsonl": "whole steps with one thing exchanged each; benchmarks/notes/decode_phases.md",
    "doctor_h200.txt": "what `fastlayers doctor --run` and `fastlayers bench model` said once",
    "host_ab_h200.jsonl": "two trees by turns, one of them older than prepared launches; host_time.* measures today's",
    "host_by_machine_h200.jsonl": "host_time.* and cold_start.* on slower hosts, at the page's commit",
    "cutlass_boundary_h200.jsonl": "sgl_kernel's experts around 2,048 rows; its program was not kept: see products",
    "tp8_layer_ways_h200.jsonl": "launches of DeepSeek-V3's layer exchanged by turns; benchmarks/notes/tp8_layer.md",
    "tp8_layer_decode_h200.jsonl": "tp8_layer as far as it came, decode; benchmarks/notes/tp8_layer.md",
    "mla_chain_h200.jsonl": "latent attention in chains, sums of parts as before and as now; benchmarks/notes/mla.md",
    "mla_columns_h200.jsonl": "latent attention with heads as columns of wgmma; benchmarks/notes/mla.md",
    "rotary_launch_h200.jsonl": "rotations launched early or behind the kernel in front; benchmarks/notes/small_ops.md",
    "fp8_second_product_h200.jsonl": "FP8 experts, second product over strips; benchmarks/notes/fused_moe_triton.md",
    "fp8_vectors_experts_h200.jsonl": "one token's FP8 experts by vectors; benchmarks/notes/fused_moe_triton.md",
    "fp8_vectors_linear_h200.jsonl": "one token's FP8 products by vectors; benchmarks/notes/fp8_linear.md",
    "slice_parts_h200.jsonl": "experts and attention as the page had them when two_gpus_slice_h200.jsonl was measured",
    "two_gpus_slice_since_h200.jsonl": "one.slice and two.slice* again, newer than what is simulated with them",
    "gather_columns_h100.jsonl": "candidates for FP8 rows whose scales lie in columns; benchmarks/notes/exchange.md",
    "two_gpus_exchange_h100.jsonl": "two.rows on two H100s; two.rows measures today's",
    "weight_only_h100.jsonl": "weight_only on an H100, with a ladder of one shape; benchmarks/notes/linear.md",
    "host_again_h200.jsonl": "host_time.*, patch_plain.*, first tokens, cold starts and patch_* beside other parts",
    "fp8_linear_again_h200.jsonl": "fp8_linear.tp1 alone, at a later commit than the page's",
    "models_h100.jsonl": "host_time.* and generate.* on an H100",
    "serve_pace_h200.jsonl": "what servers did from commit to commit; serve.* measures today's",
}
