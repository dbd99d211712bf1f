"""What our pages say of other libraries: each sentence is on its page, and has a test that runs the library.

A sentence whose library has changed fails here, and not at a reader's. The frameworks are run in `test_ecosystem` and
`test_other_pipelines`; where a package is missing, its tests skip.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shade import Checkpointer, LocalAdamW, ShadeDataset
from shade.data import cu_seqlens

ROOT = Path(__file__).resolve().parents[2]
SAID = """
docs/how-to/accelerate.md
  Accelerate would divide its batches among the ranks
    test_a_loader_given_to_accelerate_is_told_what_to_do
  `accelerator.register_for_checkpointing(sampler)` puts the sampler into `save_state`
    test_a_sampler_in_accelerates_checkpoint_continues_at_any_step
docs/how-to/checkpoint-options.md
  TorchScript refuses a hooked module
    test_torchscript_refuses_a_hooked_module
  PyTorch does not fuse the evaluation of its transformer layers
    test_a_hooked_transformer_layer_is_not_fused
docs/how-to/deepspeed.md
  DeepSpeed's file `latest` is written on return
    test_a_job_goes_on_as_if_it_had_not_ended
docs/how-to/fsdp2-and-dcp.md
  `restore_latest()` takes what was saved over another mesh
    test_no_script_differs
  A pipeline's stages need names of their own
    test_stages_come_back_to_the_ranks_that_attach_them
docs/how-to/gradient-options.md
  do exactly what Adam does with a sparse gradient
    test_it_ends_where_the_dense_optimizer_ends
docs/how-to/grain.md
  A class of a few lines is Grain's `RandomAccessDataSource`
    test_a_source_is_what_grain_takes_and_half_of_it_is_cached
  Grain reads with many threads
    test_a_source_is_what_grain_takes_and_half_of_it_is_cached
  Grain's own state continues in the middle of an epoch
    test_a_grain_loader_continues_in_mid_epoch
  The workers of `mp_prefetch` share the cache
    test_grains_worker_processes_share_the_cache
docs/how-to/hf-trainer.md
  The Trainer counts the steps of the first epoch and expects all to be as long
    play_trainer
  evaluates as the Trainer does
    test_the_trainer_trains_its_own_models_evaluates_and_keeps_the_best
docs/how-to/kubeflow.md
  The tests hold it against the schema of Trainer 2
    test_the_training_runtime_and_its_job_fit_the_schema
docs/how-to/lightning.md
  Lightning counts the steps of a loader once
    test_lightning_counts_the_steps_of_a_loader_once
  Lightning loads it only within an epoch
    test_lightning_loads_a_loaders_own_state_only_within_an_epoch
  Lightning counts on from the saved step
    test_lightning_stopped_at_any_step_and_after_any_epoch
  Lightning recognises a `ShadeSampler` as a sampler that knows the ranks
    test_lightning_leaves_the_sampler_in_its_place
docs/how-to/lr-schedules.md
  keeps the length that it was saved with, such as `T_max`, as in PyTorch
    test_a_schedule_keeps_the_length_that_it_was_saved_with
docs/how-to/mixtures-and-packing.md
  such as those of `torch.nested`, take where each begins
    test_torch_nested_takes_the_boundaries
docs/how-to/other-pipelines.md
  The nodes count the epochs and say them to the sampler
    test_a_loader_of_nodes_continues_in_mid_epoch
  With `method="process"`
    test_processes_of_a_pipeline_share_a_server_and_not_a_private_store
  indices move through Ray, in the sampler's order
    test_actors_of_ray_data_read_in_the_samplers_order_through_one_cache
  `with_transform`, whose result would be cached
    test_a_transform_that_would_be_cached_is_told_of
  `shuffle`, `select`, `train_test_split` and `split_dataset_by_node` work
    test_parts_of_a_hugging_face_data_set_are_read_by_their_own_indices
  resumes by its own means, without reading what it skips
    test_the_trainer_resumes_a_hugging_face_data_set_without_reading_what_it_skips
docs/how-to/prometheus-and-tensorboard.md
  `writer.add_scalars("shade", dataset.stats(), epoch)`
    test_tensorboard_takes_the_numbers
docs/how-to/ray-train.md
  Ray starts the workers again after a failure
    test_an_example_ends_and_leaves_nothing
  Ray runs the function in a thread
    test_ray_train_stopped_at_any_step
docs/how-to/read-weights.md
  The file is plain safetensors
    test_a_page_does_what_it_shows
docs/how-to/remote-data.md
  `images.classes` and `images.class_to_idx` are those of torchvision's `ImageFolder`
    test_it_is_imagefolder
docs/how-to/shards.md
  as WebDataset writes them
    test_a_tar_is_as_webdataset_reads_it
  as `to_pylist()` of pyarrow returns it
    test_every_type_of_a_table_is_as_pyarrow_reads_it
  `.mds` of MosaicML
    test_mds_is_as_its_own_reader
  Hugging Face's `state.json` or MosaicML's `index.json` lists the shards
    test_a_folder_of_hugging_face_has_the_shards_that_it_lists
  categories of pandas and Polars
    test_a_dictionary_of_arrow_is_refused_and_the_cast_is_the_cure
docs/how-to/skypilot.md
  The tests read it with SkyPilot's own parser
    test_skypilot_parses_the_task
docs/how-to/stateful-dataloader.md
  torchdata refuses a state of another number of workers with an AssertionError
    test_torchdata_refuses_a_state_of_other_workers
docs/how-to/text.md
  Its fingerprint follows `map()`
    test_the_fingerprint_of_a_hugging_face_data_set_follows_map
docs/how-to/video.md
  which x265 writes without `open-gop=0`
    test_open_groups_of_pictures_are_refused_by_name_and_closed_ones_are_the_cure
  mp4 and mov have one
    test_a_video_without_an_index_is_refused_by_name_and_mp4_is_the_cure
docs/reference/redis-commands.md
  Other nodes still serve when one is lost
    test_a_node_that_only_we_cannot_reach_costs_its_own_keys
  where that is refused, it reads `INFO`
    test_a_managed_server_gets_cures_that_its_user_can_follow
docs/format.md
  `xxhash.xxh3_128_hexdigest` in Python
    test_hashing_lets_others_run
shade/gradient/_optim/local_adamw.py
  Not torch's default (0.9, 0.999)
    test_the_betas_are_not_torchs
"""
"""Pages; sentences of each; and the test that runs the library."""


TESTS = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
PAGES = {page: lines for page, *lines in (re.split(r"\n +", each) for each in re.split(r"\n(?! )", SAID.strip()))}


@pytest.mark.parametrize("page", PAGES)
def test_a_sentence_is_on_its_page_and_has_its_test(page: str) -> None:
    text = re.sub(r"\s+", " ", (ROOT / page).read_text())
    for sentence, test in zip(PAGES[page][::2], PAGES[page][1::2], strict=True):
        assert sentence in text, f"{page} no longer says this: take it off the list"
        assert f"def {test}(" in TESTS, f"{test} is gone: what runs the library now?"


# ── PyTorch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_refuses_a_hooked_module(tmp_path: Path) -> None:
    for strategy in ("overlap", "asymmetric"):
        model = torch.nn.Linear(2, 2)
        options = {"persist_to": tmp_path / strategy, "run": f"said-{tmp_path.parent.name}-{strategy}"}
        with Checkpointer(**options, strategy=strategy, every="never") as checkpointer:
            checkpointer.attach(model=model)
            refused = (
                pytest.raises((AttributeError, RuntimeError)) if strategy == "asymmetric" else contextlib.nullcontext()
            )
            with refused:
                torch.jit.script(model)


def test_a_hooked_transformer_layer_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    fused: list[int] = []
    plain: Callable[..., torch.Tensor] = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: fused.append(1) or plain(*a))
    with torch.no_grad():
        layer(torch.zeros(1, 3, 8))
        assert fused == [1]
        layer.register_forward_pre_hook(lambda module, given: None)
        layer(torch.zeros(1, 3, 8))
    assert fused == [1]


def test_a_schedule_keeps_the_length_that_it_was_saved_with() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    saved, longer = (torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length) for length in (4, 8))
    longer.load_state_dict(saved.state_dict())
    assert longer.T_max == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_nested_takes_the_boundaries() -> None:
    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    values = torch.arange(8.0)[:, None]
    documents = torch.nested.nested_tensor_from_jagged(values, cu_seqlens(positions).long())
    assert [each.flatten().tolist() for each in documents.unbind()] == [[0, 1, 2], [3], [4], [5, 6, 7]]


def test_the_betas_are_not_torchs() -> None:
    ours, theirs = (inspect.signature(each).parameters["betas"].default for each in (LocalAdamW, torch.optim.AdamW))
    assert (ours, theirs) == ((0, 0.999), (0.9, 0.999))


# ── others ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_fingerprint_of_a_hugging_face_data_set_follows_map() -> None:
    datasets: Any = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"n": [1, 2, 3]})
    sets = [rows, rows.map(lambda row: {"n": row["n"] + 1}), datasets.Dataset.from_dict({"n": [1, 2, 3]})]
    names = [ShadeDataset(each, cache=None).source.fingerprint for each in sets]
    assert names[0] == names[2] != names[1]


def test_tensorboard_takes_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    dataset = ShadeDataset([1, 2, 3], cache="memory://")
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalars("shade", dataset.stats(), 0)
    assert {f"shade_{name}" for name in dataset.stats()} < {path.name for path in tmp_path.iterdir()}
    dataset.close()
