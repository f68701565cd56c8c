"""Shipped drafters: found by name, and the default for their model as long as nothing else is asked for."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deploy import defaults
from deploy.cluster import drafting
from deploy.config import load_plan, show_plan
from kadence.errors import CheckpointError
from services.drafter.draft_arch import read_draft_arch
from services.model import commands, shipped
from tests.shape.source_tree import ROOT

MODEL, NAME = "smollm2-135m-instruct", "smollm2-135m-instruct-dflash2"
KIND, CHECKPOINT, VOCABULARY = "drafter.kind", "drafter.options.checkpoint", "drafter.options.draft_vocabulary"
POLICY = "policy.name"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shipped drafters, with one in it."""
    folder = tmp_path / "models"
    (folder / NAME).mkdir(parents=True)
    (folder / NAME / "config.json").touch()
    (folder / "notes").mkdir()  # not a drafter
    monkeypatch.setattr(shipped, "ROOT", folder)
    monkeypatch.setitem(defaults.DRAFTING[MODEL], VOCABULARY, 300)
    monkeypatch.setitem(defaults.DRAFTING[MODEL], POLICY, "fixed:5")
    return folder


def chosen(**given: Any) -> tuple[Any, ...]:
    """Kind, checkpoint, draft vocabulary and policy of the plan; "__" in names is a dot."""
    plan = load_plan(None, {name.replace("__", "."): value for name, value in given.items()})
    return (*(plan.values.get(key) for key in (KIND, CHECKPOINT, VOCABULARY)), plan.scheduler.policy.name)


def test_names_and_folders(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert shipped.drafters() == {NAME: models / NAME}
    assert shipped.find_drafter(NAME) == models / NAME
    assert shipped.find_drafter("mine") == Path("mine")
    for name in ("nowhere", "notes", f"{NAME}/", "../models/nowhere"):
        with pytest.raises(CheckpointError, match=f"^{name}: no such folder.*shipped here: {NAME}$"):
            shipped.find_drafter(name)
    (models / NAME / "config.json").unlink()
    with pytest.raises(CheckpointError, match="shipped here: none"):
        shipped.find_drafter(NAME)


@pytest.mark.usefixtures("models")
def test_the_default_model_has_its_drafter() -> None:
    assert chosen() == chosen(model__path=MODEL) == ("dflash2", NAME, 300, "fixed:5")
    # Naming what it is anyway changes nothing.
    assert chosen(drafter__kind="dflash2") == chosen(drafter__options__checkpoint=NAME) == chosen()


@pytest.mark.usefixtures("models")
def test_what_is_given_stays() -> None:
    assert chosen(policy__name="off") == ("dflash2", NAME, 300, "off")
    assert chosen(drafter__options__draft_vocabulary=0) == ("dflash2", NAME, 0, "fixed:5")


@pytest.mark.usefixtures("models")
def test_nothing_of_it_is_for_others() -> None:
    for kind in ("ngram", "none", "dflash"):
        assert chosen(drafter__kind=kind) == (kind, None, None, "fixed:7")
    assert chosen(model__path="/elsewhere") == ("ngram", None, None, "fixed:7")
    assert chosen(model__path="/elsewhere", drafter__kind="dflash2") == ("dflash2", None, None, "fixed:7")
    assert chosen(drafter__options__checkpoint="mine") == ("dflash2", "mine", None, "fixed:7")


def test_without_the_folder_drafts_are_looked_up(models: Path) -> None:
    (models / NAME / "config.json").unlink()
    assert chosen() == ("ngram", None, None, "fixed:7")


def test_services_get_its_folder(models: Path, tmp_path: Path) -> None:
    plan = load_plan(None, {})
    assert drafting(plan) == f"drafter dflash2 {NAME}, policy fixed:5"
    assert plan.with_model(tmp_path).values[CHECKPOINT] == str(models / NAME)
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        load_plan(None, {CHECKPOINT: "nowhere"}).with_model(tmp_path)


@pytest.mark.usefixtures("models")
def test_a_shown_plan_and_the_example_choose_the_same(tmp_path: Path) -> None:
    file = tmp_path / "shown.toml"
    file.write_text(show_plan(load_plan(None, {})), encoding="utf-8")
    example = ROOT / "examples" / "cluster.toml"
    for plan in (load_plan(file, {}), load_plan(example, {})):
        assert {key: plan.values[key] for key in defaults.DRAFTING[MODEL]} == defaults.DRAFTING[MODEL]
    assert load_plan(example, {KIND: "ngram"}).values[KIND] == "ngram"


def test_they_are_listed(models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KADENCE_HOME", str(models.parent / "home"))
    commands._list(None)  # type: ignore[arg-type]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [[MODEL, "not", "fetched"], [NAME, str(models / NAME), "(drafter)"]]


def test_installs_bring_all_of_them() -> None:
    """What is in models/ here is in wheels too, where `shipped` looks for it."""
    placed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert shipped.ROOT == ROOT / "models"
    names = {*shipped.drafters(), *(settings[CHECKPOINT] for settings in defaults.DRAFTING.values())}
    assert placed == {f"share/kadence/models/{name}": [f"models/{name}/*"] for name in names}


def test_the_shipped_one_fits_its_settings() -> None:
    folder = shipped.find_drafter(NAME)
    arch, settings = read_draft_arch(folder), defaults.DRAFTING[MODEL]
    assert (arch.kind, arch.vocab_size) == (settings[KIND], 49152)
    ranked = json.loads((folder / "draft_vocabulary.json").read_text())["token_ids"]
    assert len(ranked) >= settings[VOCABULARY]
    assert int(settings[POLICY].removeprefix("fixed:")) <= arch.max_draft_tokens
