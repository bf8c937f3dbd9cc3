"""The registry: subclassing registers, names are resolved, mistakes are explained."""

from __future__ import annotations

import pytest

from treespark.losses import LossTerm
from treespark.policies import Budgeted, Chain, TreePolicy, parse
from treespark.registry import Registered


def test_subclass_is_found_by_name_and_abstract_base_is_not_listed() -> None:
    """A class of the user's own module is registered by being defined."""

    class Narrow(Budgeted):
        """One child per parent."""

    assert TreePolicy.get("Narrow") is Narrow
    assert TreePolicy.get("Budgeted") is Budgeted
    assert "DepthWeighted" not in LossTerm.available()
    del TreePolicy._classes["Narrow"]


def test_name_of_another_module_is_refused() -> None:
    """Two classes cannot share a name; the message names both."""
    with pytest.raises(ValueError, match=r"'Chain' is taken by treespark\.policies\.chain\.Chain; rename"):
        type("Chain", (TreePolicy,), {"__module__": "elsewhere"})
    assert TreePolicy.get("Chain") is Chain


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Budgetd", "Unknown policy 'Budgetd'. Did you mean: Budgeted? Available: BestFirst, Budgeted, Chain"),
        ("budgeted", "Did you mean: Budgeted?"),
        ("Zebra", "Unknown policy 'Zebra'. Available: "),
        ("nowhere.Policy", "cannot be imported: No module named 'nowhere'. Start in the folder that holds its file"),
        ("pathlib.Path", "'pathlib.Path' is not a policy: expected a subclass of TreePolicy"),
    ],
)
def test_unknown_names(name: str, words: str) -> None:
    """Each mistake gets one line with what to do."""
    with pytest.raises(ValueError) as error:
        TreePolicy.get(name)
    assert words in str(error.value)


def test_config_round_trip() -> None:
    """What `config` gives, `from_config` takes: the recorded policy of a checkpoint."""
    policy = Budgeted(k=3, num_draft_nodes=9, frontier_width=2)
    config = policy.config()
    assert config == {"class_path": "Budgeted", "init_args": {"k": 3, "num_draft_nodes": 9, "frontier_width": 2}}
    assert TreePolicy.from_config(config).config() == config
    assert Chain().config() == {"class_path": "Chain", "init_args": {}}
    with pytest.raises(ValueError, match="Unknown option of Budgeted 'K'. Did you mean: k"):
        TreePolicy.from_config({"class_path": "Budgeted", "init_args": {"K": 3}})


def test_policy_from_text() -> None:
    """Command lines write a policy as a call."""
    assert parse("Budgeted(k=2, num_draft_nodes=5)").config()["init_args"]["num_draft_nodes"] == 5
    assert isinstance(parse("Chain"), Chain)
    assert repr(parse(repr(Budgeted(k=2)))) == "Budgeted(k=2, num_draft_nodes=32, frontier_width=None)"
    for text in ("Budgeted(2)", "Budgeted(k=", "Budgeted(k=f())", "1 + 1"):
        with pytest.raises(ValueError):
            parse(text)
    for text in ("Budgeted(k='2')", "Budgeted(k=True)", "DDTree(num_draft_nodes=2.5)", "BestFirst(cost=3)"):
        with pytest.raises(ValueError, match="must be of type"):
            parse(text)
    assert parse("BestFirst(a=2, frontier_width=None)").config()["init_args"]["a"] == 2


def test_bases_do_not_share_their_names() -> None:
    """A loss and a policy may carry the same name."""
    assert LossTerm._classes is not TreePolicy._classes
    assert Registered not in (LossTerm, TreePolicy)
