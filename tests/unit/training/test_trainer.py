"""Training on a tiny target: it learns, and a run that was stopped ends with the weights of one that was not."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kadence.errors import CheckpointError, ConfigError, KadenceError
from services.drafter.draft_arch import read_draft_arch
from services.model.arch import read_arch
from tests.support import tiny_drafter, tiny_model
from tests.support.mock_device import MockCuda
from tests.support.tiny_llama import TinyLlama
from training import batches, checkpoint, train
from training.conversations import Conversation
from training.examples import Cache, Origin, write
from training.features import Extractor
from training.recipe import Recipe
from training.trainer import Trainer

from services.verifier.target import Target  # isort: skip

RECIPE = Recipe(
    taps=(0, 2),
    layers=1,
    rank=8,
    mask_token=tiny_drafter.MASK,
    vocabulary=256,
    batch=2,
    anchors=6,
    warm_up=5,
    steps=40,
    muon_rate=5e-3,
    rate=5e-3,
    codebook_rate=1e-2,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, features of 60 of its greedy conversations, and a ranking of ids."""
    folder = tmp_path_factory.mktemp("training")
    tiny = TinyLlama(folder / "model", num_hidden_layers=tiny_drafter.TARGET_LAYERS)
    draw = torch.Generator().manual_seed(3)
    conversations = []
    for _ in range(60):
        prompt = torch.randint(4, 40, (6,), generator=draw).tolist()
        whole = tiny.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        conversations.append(Conversation(tuple(prompt), tuple(whole[0, 6:].tolist())))
    (folder / "features").mkdir()
    examples = Extractor(Target(tiny.folder, "bfloat16"), RECIPE.taps)(conversations)
    write(folder / "features" / "all.safetensors", conversations, examples)
    ids = list(range(tiny_model.VOCAB_SIZE))
    (folder / "ranking.json").write_text(json.dumps({"token_ids": ids}))
    return folder


def trainer(folder: Path, recipe: Recipe = RECIPE, init: Path | None = None) -> Trainer:
    made = Trainer(recipe, folder / "model", Cache(folder / "features"), folder / "ranking.json", CPU)
    made.begin(init)
    return made


def test_training_lowers_the_loss_on_what_it_has_not_seen(folder: Path) -> None:
    made = trainer(folder)
    assert made.examples[1] > 0
    before = made.look()
    for _ in range(RECIPE.steps):
        made.advance()
    after = made.look()
    assert after["loss"] < 0.9 * before["loss"]
    assert after["oracle"] > before["oracle"]
    assert 1 <= after["walk"] <= after["oracle"] and 1 <= after["unary"] <= after["oracle"]


def test_losses_and_drafts_on_a_device(folder: Path) -> None:
    """Nothing that a look at held-out examples makes stays on the host."""
    made = trainer(folder)
    wanted = made.look()
    with MockCuda():
        for module in made.model.modules():  # Module.to would lose what says that a tensor is there
            for held in (module._parameters, module._buffers):
                held.update({name: x.to("cuda") for name, x in held.items() if x is not None})
        made.head, made._device = made.head.to("cuda"), torch.device("cuda")
        assert made.look() == pytest.approx(wanted, rel=0.02)


def test_a_run_that_was_stopped_ends_with_the_same_weights(folder: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=8)
    whole, first, second = (trainer(folder, recipe) for _ in range(3))
    for _ in range(8):
        whole.advance()
    for _ in range(3):
        first.advance()
    first.save(tmp_path / "state.pt")
    second.load(tmp_path / "state.pt")
    assert second.step == 3
    while second.step < 8:
        second.advance()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_one_seed_gives_one_result_and_another_seed_another(folder: Path) -> None:
    runs = [trainer(folder, replace(RECIPE, seed=seed)) for seed in (1, 1, 2)]
    losses = [[run.advance()["loss"] for _ in range(3)] for run in runs]
    assert losses[0] == losses[1] != losses[2]


def test_what_is_exported_is_what_was_trained(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder)
    made.advance()
    made.export(tmp_path)
    assert read_draft_arch(tmp_path) == RECIPE.arch(read_arch(folder / "model"))
    again = trainer(folder, init=tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert checkpoint.load(again.model, tmp_path, again.vocabulary) == []
    for name, tensor in again.model.state_dict().items():
        kept = stored[name].float()
        assert torch.equal(tensor, kept[again.vocabulary] if name.endswith("codebook") else kept), name
    assert stored["fc.weight"].dtype == torch.bfloat16


def test_the_command_trains_and_goes_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--features={folder / 'features'}", f"--model={folder / 'model'}", f"--out={tmp_path}"]
    words += [f"--ranking={folder / 'ranking.json'}", f"--mask-token={tiny_drafter.MASK}", "--taps=0,2", "--layers=1"]
    words += ["--vocabulary=256", "--batch=2", "--anchors=4", "--every=2", "--warm-up=1"]
    assert train.main([*words, "--steps=3"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 3]
    assert [line.get("conversations") for line in lines] == [
        None,
        *[len(batches.split(Cache(folder / "features"))[0])] * 2,
    ]
    assert lines[-1]["minutes_left"] == 0 and lines[-1]["blocks_per_second"] > 0
    assert train.main([*words, "--steps=5"]) == 0
    assert "; step 3 of 5" in capsys.readouterr().out
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["step"] == 5
    assert json.loads((tmp_path / "recipe.json").read_text())["steps"] == 5
    assert train.main([*words, "--steps=5", "--gamma=2"]) == 1
    assert "gamma is 2.0, and was 4.0" in capsys.readouterr().err
    (tmp_path / "state.pt").write_bytes(b"no state")
    assert train.main([*words, "--steps=5"]) == 1
    assert "state.pt: damaged" in capsys.readouterr().err
    for wrong, told in (
        ("--every=0", "--every is 0; at least 1"),
        ("--threads=-1", "--threads is -1; at least 0"),
        ("--device=nowhere", "--device is 'nowhere': "),
    ):
        assert train.main([*words, wrong]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and told in error and error.count("\n") == 1


def test_what_is_not_finite_changes_no_weights(folder: Path) -> None:
    made = trainer(folder)
    made.advance()
    with torch.no_grad():
        made.model.norm.weight[0] = torch.inf
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    with pytest.raises(ConfigError, match="step 1: the loss or its gradient is not finite"):
        made.advance()
    assert made.step == 1
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_full_disk_leaves_the_last_state(folder: Path, tmp_path: Path) -> None:
    made, path = trainer(folder), tmp_path / "state.pt"
    made.save(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        for write in (lambda: made.save(path), lambda: made.export(tmp_path)):
            with pytest.raises(OSError, match=r"cannot be written, the disk may be full"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"] and path.read_bytes() == before


def test_a_state_of_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    made, path = trainer(folder), tmp_path / "state.pt"
    made.save(path)
    state = torch.load(path, weights_only=True)
    state["model"]["fc.weight"] = state["model"]["fc.weight"][:, 1:].clone()
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"state\.pt: of a drafter for another target"):
        made.load(path)


@pytest.mark.parametrize("part", [0, 1])
def test_features_with_nothing_held_out_are_refused(folder: Path, tmp_path: Path, part: int) -> None:
    cache = Cache(folder / "features")
    examples = [cache[index] for index in batches.split(cache)[part]]
    write(tmp_path / "one.safetensors", [Conversation((5,), (7, 8))] * len(examples), examples)
    with pytest.raises(ConfigError, match=f"{part * len(examples)} of {len(examples)} conversations are held out"):
        Trainer(RECIPE, folder / "model", Cache(tmp_path), folder / "ranking.json", CPU)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kind", "mtp", "kind is 'mtp'; one of dflash2, dflash"),
        ("soft", 1.5, "soft is 1.5; 0 to 1"),
        ("block", 1, "block is 1; 2 to 16"),
        ("steps", 0, "steps is 0; 1 to"),
        ("rate", float("nan"), "rate is nan"),
        ("seed", 2**63, "seed is"),
    ],
)
def test_recipes_out_of_range_are_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(RECIPE, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("taps", (2, 0), r"taps are \[2, 0\]; ascending"),
        ("taps", (0, 4), r"of 0 to 3"),
        ("mask_token", 10_000, "mask_token is 10000"),
        ("vocabulary", 10_000, "10000"),
    ],
)
def test_recipes_that_do_not_fit_the_target_are_refused(folder: Path, field: str, value: object, words: str) -> None:
    with pytest.raises(KadenceError, match=words):
        trainer(folder, replace(RECIPE, **{field: value}))


def test_features_of_other_taps_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="taps"):
        trainer(folder, replace(RECIPE, taps=(0, 1, 2)))


def test_features_of_more_taps_are_as_good(folder: Path, tmp_path: Path) -> None:
    cache = Cache(folder / "features")
    conversations = [Conversation((5,), (7, index)) for index in range(len(cache))]
    examples = []
    for example in cache:
        first, last = example.taps.chunk(2, dim=1)
        examples.append(replace(example, taps=torch.cat([first, torch.randn_like(first), last], dim=1)))
    write(tmp_path / "all.safetensors", conversations, examples, Origin("", (0, 1, 2), 32))
    less = trainer(folder)
    more = Trainer(RECIPE, folder / "model", Cache(tmp_path), folder / "ranking.json", CPU)
    more.begin(None)
    for made in (less, more):
        made.advance()
    pairs = zip(less.model.state_dict().values(), more.model.state_dict().values(), strict=True)
    assert all(ours.equal(theirs) for ours, theirs in pairs)


def test_features_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    cache = Cache(folder / "features")
    conversations = [Conversation((5, 6), (7, 8, 9))] * len(cache)
    examples = [cache[index] for index in range(len(cache))]
    origin = Origin(model="0" * 32, taps=RECIPE.taps, likeliest=32)
    write(tmp_path / "one.safetensors", conversations, examples, origin)
    with pytest.raises(ConfigError, match="of the model 0000"):
        Trainer(RECIPE, folder / "model", Cache(tmp_path), folder / "ranking.json", CPU)


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    recipe = replace(RECIPE, warm_up=4, steps=20, decay=0.5)
    rates = [recipe.rate_at(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:11] == [1.0] * 7
    assert rates[11:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_a_drafter_of_other_sizes_cannot_be_begun_with(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder)
    made.export(tmp_path)
    with pytest.raises(CheckpointError, match=r"candidate_selector.*shape"):
        trainer(folder, replace(RECIPE, rank=4), init=tmp_path)


def test_layers_that_a_drafter_lacks_come_from_the_target(folder: Path, tmp_path: Path) -> None:
    made = trainer(folder)
    made.export(tmp_path)
    deeper = trainer(folder, replace(RECIPE, layers=2), init=tmp_path)
    target = load_file(folder / "model" / "model.safetensors")
    name = "mlp.down_proj.weight"
    assert torch.equal(deeper.model.state_dict()[f"layers.1.{name}"], target[f"model.layers.3.{name}"].float())
    assert torch.equal(
        deeper.model.state_dict()[f"layers.0.{name}"],
        load_file(tmp_path / "model.safetensors")[f"layers.0.{name}"].float(),
    )
