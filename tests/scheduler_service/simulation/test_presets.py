"""Preset files: packaged ones load, a user's own are read as strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.domain import InvalidInputError
from scheduler_service.simulation.presets import load_cluster, load_hardware, load_model, preset_names


@pytest.mark.parametrize("name", preset_names("hardware"))
def test_every_packaged_gpu_loads(name: str) -> None:
    assert load_hardware(name).name == name.upper()


def test_names_may_be_written_with_hyphens() -> None:
    assert load_cluster("paper-512-h20") == load_cluster("paper_512_h20")


def test_a_file_says_only_what_differs_from_its_base(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: h800\nname: mine\nattention: {forward_flops: 500e12}\n")
    found, base = load_hardware(str(mine)), load_hardware("h800")
    assert found.attention.forward_flops == 5e14
    assert found.attention.backward_flops == base.attention.backward_flops
    assert found.network_bandwidth == base.network_bandwidth


def test_a_cluster_file_may_say_which_ranks_are_slow(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: paper_512_h20\nspeeds: {13: 0.5, 8: 0}\n")
    found = load_cluster(str(mine))
    assert found.speeds == found.pool.speeds == ((8, 0.0), (13, 0.5))
    mine.write_text("base: paper_512_h20\nspeeds: {128: 0.5}\n")
    with pytest.raises(InvalidInputError, match="speeds names rank 128; the pool has ranks 0 … 127"):
        load_cluster(str(mine))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: h800\npeak: 1", "has no field 'peak'; the fields are name, peak_flops"),
        ("base: h800\npeak_flops: fast", "peak_flops is 'fast'; give a number"),
        ("base: h800\ngpus_per_node: 2.5", "gpus_per_node is 2.5; give a whole number"),
        ("base: h800\npeak_flops: true", "peak_flops is True; give a number"),
        ("base: h800\npeak_flops: -1", "peak_flops is -1; give a number above 0"),
        ("base: h800\nmemory_bandwidth: 5e-324", "memory_bandwidth is 5e-324; give a number above 0"),
        ("base: h800\nattention: {forward_flops: 0}", "attention: forward_flops is 0; give a number above 0"),
        ("base: h800\nattention: {walk_s: .nan}", "attention: walk_s is nan; give a number above 0"),
        ("base: h800\ngpus_per_node: 99999999999", "gpus_per_node is too large; give a whole number below 2,147"),
        ("base: h800\nattention: 3", "attention is 3; give its fields"),
        ("base: h999", "h999: is not among the hardware: a100"),
        ("name: [", "is no YAML"),
        ("name: 2026-02-30", "is no YAML"),
        ("name: !!timestamp tomorrow", "is no YAML"),
        (f"name: {'[' * 3000}", "is no YAML"),
        (f"peak_flops: {'9' * 5000}", "is no YAML"),
        ("- 1", "holds no mapping"),
        ("name: x\nattention: {launch_s: 1}", "lacks the fields walk_s, forward_flops, backward_flops"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    with pytest.raises(InvalidInputError) as error:
        load_hardware(str(mine))
    assert message in str(error.value)


def test_a_file_that_builds_on_itself_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"base: {mine}")
    with pytest.raises(InvalidInputError, match="circle"):
        load_hardware(str(mine))


@pytest.mark.parametrize("kind", ["linear", "[grouped_query]"])
def test_an_unknown_kind_of_attention_names_the_known_ones(tmp_path: Path, kind: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"base: llama3_8b\nattention: {{kind: {kind}}}")
    with pytest.raises(InvalidInputError, match="grouped_query, latent"):
        load_model(str(mine))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expert_load: .nan", "expert_load is nan; give a number from 1"),
        ("reserved_bytes: .inf", "reserved_bytes is inf; give a number from 0"),
        ("dollars_per_gpu_hour: -1", "dollars_per_gpu_hour is -1; give a number from 0"),
        ("bucket_parameters: 0", "bucket_parameters is 0; give a number from 1"),
    ],
)
def test_a_cluster_s_numbers_are_finite_and_mean_something(tmp_path: Path, text: str, message: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"base: paper_512_h20\n{text}")
    with pytest.raises(InvalidInputError, match=message):
        load_cluster(str(mine))


def test_a_file_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match=r"nowhere\.yaml: cannot be read"):
        load_model("nowhere.yaml")
