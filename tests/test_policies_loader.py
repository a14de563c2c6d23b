"""Every malformed policy gives one readable error at its place, and nothing a file holds can raise anything else."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreshock import policies
from foreshock.policies import SHIPPED, PolicyError, load, loads, resolve, shipped
from foreshock.policies.schema import dumps, json_schema

SOUND = """\
apiVersion: foreshock/v1
name: test
mode: dry_run
false_alarms: 1 per 100000 steps
budget: {actions: 6, rollbacks: 2}
group_wait: 8 steps
receivers: {oncall: {url_env: FORESHOCK_ONCALL}}
policies:
  - name: attention
    summary: Attention is sick
    match: {mechanism: attention}
    for: 3 samples
    group_by: [mechanism]
    ladder:
      - do: [{precision_upcast: {target: affected, dtype: float32}}]
      - do: [{rollback: {before: onset}}]
        approval: {expires: 500 steps, on_expiry: nothing}
    verify: {signals: diagnosed, initial_delay: 96 steps, interval: 8 steps, band: 3 sigma, recovered: 5 in a row, failed: 3 of 8, timeout: 400 steps}
    cooldown: 1000 steps
    notify: [oncall]
  - name: divergence
    match: {mechanism: [data, unknown], severity: critical}
    inhibited_by: [attention]
    for: 5 steps
    ladder:
      - do: [{lr_scale: {target: model, factor: 0.5}}, {notify: {}}]
      - do: [{pause: {}}]
"""

# (what is replaced, by what, the text that the error must point at, line, words of the message, of the suggestion)
MALFORMED = {
    "wrong version": ("foreshock/v1", "foreshock/v2", "foreshock/v2", 1, "is not foreshock/v1", "foreshock/v1"),
    "no version": ("apiVersion: foreshock/v1\n", "", "name: test", 1, "missing key 'apiVersion'", "add"),
    "unknown key": ("cooldown:", "cooldwn:", "cooldwn", 19, "unknown key 'cooldwn'", "`cooldown`"),
    "unknown key like none": ("cooldown:", "zzz:", "zzz", 19, "unknown key 'zzz'", "known: name"),
    "misspelt needed key": ("    ladder:\n      - do: [{lr", "    lader:\n      - do: [{lr", "lader", 25, "'lader'", "`ladder`"),
    "unknown key on top": ("group_wait", "groupwait", "groupwait", 6, "unknown key", "`group_wait`"),
    "unknown mode": ("dry_run", "dryrun", "dryrun", 3, "not one of observe, dry_run, enforce", "`dry_run`"),
    "bad name": ("name: test", "name: My Test", "My Test", 2, "not a name in lower case", "non-finite"),
    "name is a number": ("name: test", "name: 3", "3", 2, "'3' is not a name", "non-finite"),
    "number without unit": ("1000 steps", "1000", "1000", 19, "'1000' is not a number of steps with", "`8 steps`"),
    "wrong unit": ("3 samples", "3 minutes", "3 minutes", 12, "not a number of samples or steps", "`3 samples`"),
    "steps where sigma belongs": ("3 sigma", "3 steps", "3 steps", 18, "not a width in sigma", "`3 sigma`"),
    "no sigma at all": ("3 sigma", "0 sigma", "0 sigma", 18, "not a width in sigma", "`3 sigma`"),
    "budget without per": ("1 per 100000 steps", "1e-5", "1e-5", 4, "not a budget of false alarms", "`1 per"),
    "zero false alarms": ("1 per 1", "0 per 1", "0 per", 4, "not a budget of false alarms", "`1 per"),
    "never in a row": ("5 in a row", "5", "5, failed", 18, "not a number of samples in a row", "`5 in a row`"),
    "more than all": ("3 of 8", "9 of 8", "9 of 8", 18, "can never happen", "`8 of 9`"),
    "interval of zero": ("interval: 8 steps", "interval: 0 steps", "0 steps", 18, "not a positive number", "`8 steps`"),
    "timeout too early": ("400 steps", "96 steps", "96 steps}", 18, "cannot be counted", "at least `128 steps`"),
    "timeout before enough": ("5 in a row", "50 in a row", "400 steps", 18, "'50 in a row' cannot", "`488 steps`"),
    "unknown mechanism": ("mechanism: attention", "mechanism: atention", "atention", 11, "'atention' is not", "`attention`"),
    "unknown one of several": ("data, unknown", "data, sun", "sun", 22, "'sun' is not one of", "known: attention"),
    "unknown severity": ("severity: critical", "severity: high", "high", 22, "warning, critical", "known: warning"),
    "empty match": ("{mechanism: attention}", "{}", "{}", 11, "missing key 'mechanism'", "add `mechanism"),
    "no mechanisms": ("[data, unknown]", "[]", "[]", 22, "an empty list", "at least 1"),
    "unknown action": ("{rollback:", "{rolback:", "rolback", 16, "unknown action 'rolback'", "`rollback`"),
    "two actions in one": ("{rollback: {", "{pause: {}, rollback: {", "{pause", 16, "one action expected, 2", "list item"),
    "no action in one": ("{pause: {}}", "{}", "{}", 27, "one action expected, none", "list item"),
    "action without braces": ("{pause: {}}", "pause", "pause", 27, "a mapping of keys is expected", "key: value"),
    "argument of another": ("dtype: float32", "factor: 0.5", "factor", 15, "unknown key 'factor'", "known: target"),
    "unknown dtype": ("float32", "float16", "float16", 15, "not one of float32, stabilised", "`float32`"),
    "rollback to nowhere": ("before: onset", "before: 500 steps", "500 steps", 16, "is not onset", "onset"),
    "factor above one": ("factor: 0.5", "factor: 2", "2}", 26, "'2' is not below 1", "below 1"),
    "factor is text": ("factor: 0.5", "factor: half", "half", 26, "'half' is not a number", "without quotes"),
    "factor infinite": ("factor: 0.5", "factor: 1e999", "1e999", 26, "'inf' is not a finite", "0.1"),
    "factor missing": (", factor: 0.5", "", "{target: model}", 26, "missing key 'factor'", "add `factor"),
    "lr of nothing": ("target: model", "target: everything", "everything", 26, "or a list of parameter names", "affected"),
    "negative budget": ("actions: 6", "actions: -1", "-1", 5, "'-1' is below 0", "0 or more"),
    "budget in quotes": ("actions: 6", 'actions: "6"', '"6"', 5, "'6' is not a whole number", "without quotes"),
    "budget is yes": ("actions: 6", "actions: true", "true", 5, "'true' is not a whole number", "without quotes"),
    "one word for a list": ("[mechanism]", "mechanism", "mechanism", 13, "'mechanism' stands where a list", "[...]"),
    "list for a mapping": ("{oncall: {url_env: FORESHOCK_ONCALL}}", "[oncall]", "[oncall]", 7, "a mapping of names is expected", "name: {"),
    "ladder is empty": ("    ladder:\n      - do: [{lr_scale: {target: model, factor: 0.5}}, {notify: {}}]\n      - do: [{pause: {}}]\n", "    ladder: []\n", "[]", 25, "an empty list", "at least 1 entry"),
    "rung is empty": ("do: [{pause: {}}]", "do: []", "[]", 27, "an empty list", "at least 1 entry"),
    "summary is a list": ("Attention is sick", "[sick]", "[sick]", 10, "a list is not text", "quotes"),
    "unknown group": ("[mechanism]", "[mechanism, layer]", "layer", 13, "'layer' is not mechanism", "mechanism"),
    "unknown receiver": ("notify: [oncall]", "notify: [oncal]", "oncal", 20, "unknown receiver 'oncal'", "`oncall`"),
    "url in the file": ("FORESHOCK_ONCALL", "https://hooks", "https", 7, "not the name of an environment", "FORESHOCK_"),
    "receiver's bad name": ("{oncall: {", "{on call: {", "on call", 7, "not a name in lower case", "non-finite"),
    "unknown inhibitor": ("[attention]", "[atention]", "atention", 23, "unknown policy 'atention'", "`attention`"),
    "inhibits itself": ("[attention]", "[divergence]", "[divergence]", 23, "divergence by divergence", "remove"),
    "ring of inhibitors": ("    group_by:", "    inhibited_by: [divergence]\n    group_by:", "[divergence]", 13, "each other back", "remove"),
    "two of one name": ("name: divergence", "name: attention", "attention", 21, "a second policy named", "of its own"),
    "shadowed policy": ("mechanism: [data, unknown]", "mechanism: attention", "{mechanism", 22, "never matches", "move it up"),
    "approval to notify": ("[{rollback: {before: onset}}]", "[{notify: {}}]", "approval", 17, "only notifies", "remove"),
    "bad expiry": ("on_expiry: nothing", "on_expiry: ignore", "ignore", 17, "nothing, next_rung, act", "known"),
    "no rung to pass on to": ("on_expiry: nothing", "on_expiry: next_rung", "next_rung", 17, "no next rung", "`nothing`"),
    "rung after the pause": ("{lr_scale: {target: model, factor: 0.5}}", "{pause: {}}", "do", 27, "never reached", "`pause` last"),
    "router remedy for attention": ("{rollback: {before: onset}}", "{router_rescale: {}}", "router_rescale", 16, "repairs the router", "`router`"),
    "attention remedy for data": ("[data, unknown], severity: critical}", "data}\n    ladder: [{do: [{qk_clip: {threshold: 50}}]}]\n  - name: last\n    match: {mechanism: unknown}", "qk_clip", 23, "repairs the attention", "`attention`"),
    "no signals": ("signals: diagnosed", "signals: []", "[]", 18, "not diagnosed or a list of signal names", "diagnosed"),
    "duplicate key": ("mode: dry_run", "mode: dry_run\nname: two", "name: two", 4, "duplicate key 'name'", "line 2"),
    "duplicate key, same value": ("8 steps\n", "8 steps\ngroup_wait: 8 steps\n", "group_wait", 7, "duplicate key", "line 6"),
    "second document": ("mode: dry_run", "mode: dry_run\n---\nname: two", "---", 4, "a second document", "one file"),
    "tab": ("    summary", "\tsummary", "\t", 10, "a tab in the indentation", "spaces"),
    "tab after spaces": ("    summary", "  \tsummary", "\t", 10, "a tab in the indentation", "spaces"),
    "python tag": ("name: test", "name: !!python/object/apply:os.system [ls]", "!!python", 2, "a tag", "plain values"),
    "own tag": ("name: test", "name: !env HOME", "!env", 2, "a tag '!env'", "plain values"),
    "binary": ("name: test", "name: !!binary aGk=", "!!binary", 2, "a tag", "plain values"),
    "anchor": ("name: test", "name: &n test", "&n", 2, "an anchor or alias '&n'", "write the values out"),
    "undefined alias": ("name: test", "name: *n", "*n", 2, "an anchor or alias '*n'", "write the values out"),
    "merge key": ("mode: dry_run", "<<: {mode: dry_run}", "<<", 3, "unknown key '<<'", "known"),
    "key is a number": ("name: test", "7: test", "7", 2, "not a plain word", "remove"),
    "key is a list": ("name: test", "? [a]\n: b", "[a]", 2, "not a plain word", "remove"),
    "unclosed bracket": ("notify: [oncall]", "notify: [oncall", ": divergence", 21, "not YAML", "from line 20"),
    "bad indentation": ("    cooldown", "   cooldown", "cooldown", 19, "not YAML", "indentation"),
    "unprintable": ("is sick", "is \x07sick", "\x07", 10, "does not allow", "remove"),
}  # fmt: skip


def problems_of(text: str | bytes) -> tuple[policies.Problem, ...]:
    with pytest.raises(PolicyError) as caught:
        loads(text, "p.yaml")
    return caught.value.problems


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_policy_gives_one_readable_error_at_its_place(case: str) -> None:
    old, new, pointed, line, message, suggestion = MALFORMED[case]
    assert SOUND.count(old) >= 1
    text = SOUND.replace(old, new, 1)
    (problem,) = problems_of(text)
    assert problem.line == line
    assert text.splitlines()[line - 1][problem.column - 1 :].startswith(pointed)
    assert message in problem.message
    assert suggestion in problem.suggestion
    assert str(problem).startswith(f"p.yaml:{line}:{problem.column}: ")
    assert "\n  help: " in str(problem)
    assert not re.search(r"Input should|pydantic|\[type=|<class", str(problem))


def test_there_are_at_least_thirty_malformed_policies_and_the_text_they_start_from_is_sound() -> None:
    assert len(MALFORMED) >= 30
    assert loads(SOUND).name == "test"


def test_each_of_several_mistakes_is_reported_once_and_in_file_order() -> None:
    text = (
        SOUND.replace("dry_run", "dryrun")
        .replace("    for: 3 samples", "    fro: 3 samples")
        .replace("0.5", "2")
    )
    assert [p.line for p in problems_of(text)] == [3, 12, 26]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("null\n", "the file is empty"),
        ("null\n---\na: 1\n", "a second document"),
        ("- a\n", "a mapping of keys is expected"),
        ("[" * 500, "nested too deeply"),
        ("a: " + "x" * 300_000, "larger than"),
        (SOUND.encode("utf-16"), "not UTF-8"),
        (b"name: t\xe9st\n", "not UTF-8"),
    ],
)
def test_what_is_no_policy_at_all_is_one_error(text: str | bytes, message: str) -> None:
    (problem,) = problems_of(text)
    assert message in problem.message


def test_an_alias_bomb_is_refused_at_its_first_anchor_without_being_expanded() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)
    )
    (problem,) = problems_of(bomb)
    assert (problem.line, problem.message) == (1, "an anchor or alias '&a0'")


def test_no_text_within_the_size_limit_takes_long() -> None:
    for text in (" \t\n" * 20_000, "\t" * 60_000, " " * 60_000, "? " * 30_000, "- " * 30_000):
        start = time.process_time()
        assert problems_of(text)
        assert time.process_time() - start < 5


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, "nul\0byte"):
        with pytest.raises(PolicyError, match="cannot be read") as caught:
            load(path)
        assert caught.value.problems[0].file == str(path)


def test_a_byte_order_mark_and_windows_line_ends_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SOUND.replace("\n", "\r\n").encode())
    assert load(path) == loads(SOUND)


def test_an_argument_in_braces_never_disturbs_the_message() -> None:
    (problem,) = problems_of(SOUND.replace("dry_run", '"{value} {0}"'))
    assert "{value} {0}" in problem.message


@settings(deadline=None, max_examples=80)
@given(st.one_of(st.text(), st.binary()))
@example("a: \ud800")
@example("%YAML 9.9\n---\na: 1\n")
@example("a: !!int x")
@example("a: 0x")
@example(b"\xff\xfe")
def test_arbitrary_text_raises_nothing_but_a_policy_error(text: str | bytes) -> None:
    assert problems_of(text)


WORDS = st.sampled_from(
    [
        *re.split(r"(\W)", SOUND),
        "&a ",
        "*a",
        "!x ",
        "!!float ",
        "1_0",
        ".inf",
        "0o7",
        "2020-01-01",
        "%",
        "? ",
        "|",
        ">",
    ]
)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, len(SOUND)), st.integers(0, 12), WORDS), min_size=1, max_size=3))
def test_a_damaged_policy_loads_or_says_where_it_is_damaged(edits: list[tuple[int, int, str]]) -> None:
    text = SOUND
    for at, length, word in edits:
        text = text[:at] + word + text[at + length :]
    try:
        found = loads(text).policies
        problems: tuple[policies.Problem, ...] = ()
    except PolicyError as error:
        found, problems = (), error.problems
    lines = text.count("\n") + 1
    assert found or problems
    assert all(1 <= p.line <= lines and p.column >= 1 and p.suggestion for p in problems)


@settings(deadline=None, max_examples=50)
@given(data=st.binary())
def test_arbitrary_bytes_in_a_file_raise_nothing_but_a_policy_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.yaml"
    path.write_bytes(data)
    with pytest.raises(PolicyError):
        load(path)


def test_shipped_policies_are_found_by_name_and_paths_by_path(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(SOUND)
    assert resolve(path) == loads(SOUND)
    assert [resolve(name).name for name in SHIPPED] == list(SHIPPED)
    with pytest.raises(PolicyError, match="did you mean `default`"):
        shipped("defualt")


def test_the_first_run_asks_before_every_change_and_the_unattended_one_never_asks() -> None:
    default, unattended = shipped("default"), shipped("unattended")
    assert (default.mode, unattended.mode) == ("dry_run", "enforce")
    assert all(
        rung.approval for policy in default.policies for rung in policy.ladder if rung.changes_training
    )
    assert not any(rung.approval for policy in unattended.policies for rung in policy.ladder)
    assert [p.name for p in default.policies] == ["non-finite", "attention-low-precision", "divergence"]
    assert [p.name for p in unattended.policies] == [*(p.name for p in default.policies), "optimizer-step"]
    for policy in (*default.policies, *unattended.policies):
        assert policy.summary


def test_the_committed_schema_is_the_one_the_models_make() -> None:
    committed = Path(policies.__file__).with_name("policy.schema.json").read_text()
    assert committed == dumps(), "write `foreshock policy schema` to foreshock/policies/policy.schema.json"


def test_the_schema_accepts_sound_policies_and_refuses_broken_shapes() -> None:
    from ruamel.yaml import YAML

    def read(text: str) -> object:
        return YAML(typ="safe", pure=True).load(text)

    jsonschema.Draft7Validator.check_schema(json_schema())
    validator = jsonschema.Draft7Validator(json_schema())
    library = Path(policies.__file__).with_name("library")
    for text in (SOUND, *((library / f"{name}.yaml").read_text() for name in SHIPPED)):
        validator.validate(read(text))
    for case in (
        "unknown key",
        "wrong unit",
        "unknown action",
        "two actions in one",
        "factor above one",
        "no signals",
    ):
        old, new, *_ = MALFORMED[case]
        assert not validator.is_valid(read(SOUND.replace(old, new, 1))), case


def test_the_surface_is_sorted_and_light() -> None:
    assert policies.__all__ == sorted(
        policies.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n)
    )
    assert all(hasattr(policies, name) for name in policies.__all__)
    heavy = "{'torch', 'ray', 'sqlalchemy', 'ruamel', 'ruamel.yaml'} & set(sys.modules)"
    run = f"import sys, foreshock.policies.actions; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", run], check=True)
