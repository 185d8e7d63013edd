"""The docs say what the code does: every name has its heading, every example runs, every link leads somewhere."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import typer

import fedforget as ff
from fedforget import cli, methods, models, optim
from fedforget.config import TrainConfig
from fedforget.data import datasets
from fedforget.federation import aggregate

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def headings(page: str) -> set[str]:
    return set(re.findall(r"^##+ `?([^`\n]+)`?$", (ROOT / page).read_text(), re.MULTILINE))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands() -> dict[str, object]:
    return dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


def test_every_command_has_its_heading() -> None:
    assert headings("docs/commands.md") == set(commands())


def test_every_method_has_its_heading() -> None:
    assert set(methods.BUILT_IN) <= headings("docs/methods.md")


def test_every_dataset_has_its_heading() -> None:
    assert set(datasets.BUILT_IN) <= headings("docs/data.md")


def test_every_part_of_a_plan_is_described() -> None:
    text = (ROOT / "docs/plans.md").read_text()
    for name in (field.name for field in dataclasses.fields(ff.Plan)):
        assert f"| `{name}` |" in text, name
    for name in (*optim.BUILT_IN, *aggregate.BUILT_IN):
        assert f"| `{name}` |" in text, name
    for name in models.BUILT_IN:
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("optimizer", [optim.DiagonalFisher, optim.Muon])
def test_every_setting_of_an_optimizer_is_described(optimizer: type) -> None:
    _, text = (ROOT / "docs/optim.md").read_text().split(f"\n## {optimizer.__name__}\n")
    table = text.split("\n## ")[0]
    for name in list(inspect.signature(optimizer).parameters)[1:]:
        assert f"| `{name}` |" in table, name


@pytest.mark.parametrize("page", ["README.md", "docs/optim.md"])
def test_python_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for example in blocks(page, "python"):
        exec(compile(example, page, "exec"), {"__name__": "example"})
    if page == "README.md":
        assert "bit for bit" in capsys.readouterr().out


def test_the_readme_example_is_short() -> None:
    (example,) = blocks("README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15


def test_toml_examples_are_settings_of_train(tmp_path: Path) -> None:
    for example in blocks("docs/plans.md", "toml"):
        tomllib.loads(example)
        (tmp_path / "plan.toml").write_text(example)
        assert TrainConfig.merged(tmp_path / "plan.toml", {}).rounds == 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_docs_exist_with_their_options(page: Path) -> None:
    known = commands()
    for line in re.findall(r"^(?:\$ )?fedforget (.+)$", page.read_text(), re.MULTILINE):
        words = line.split("#")[0].split()
        assert words[0].startswith("--") or words[0] in known, line
        if words[0] in known:
            options = {option for part in known[words[0]].params for option in part.opts}  # type: ignore[attr-defined]
            assert {word for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
