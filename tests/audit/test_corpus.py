"""The corpus: complete, sealed, reproducible, and every completion is what it is said to be."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from longreach.audit import loader, manifest
from longreach.audit.loader import load_corpus, private_split
from longreach.audit.manifest import CorpusError, seal
from longreach.audit.proof import ProofError, check
from longreach.audit.schema import CLASSES, Sample, Tolerance

PUBLIC = load_corpus()
ALL = [(task, sample) for task in PUBLIC.tasks for sample in task.exploits]


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(loader.PUBLIC, tmp_path / "corpus")
    return tmp_path / "corpus"


def test_size_and_classes():
    assert len(PUBLIC.tasks) >= 12
    assert len(ALL) >= 60
    assert {s.exploit.classification for _, s in ALL} == set(CLASSES)
    for task in PUBLIC.tasks:
        assert len(task.honest) >= 2 and len(task.wrong) >= 2 and task.exploits, task.id


def test_every_exploit_names_mechanism_source_and_control():
    for task, sample in ALL:
        exploit = sample.exploit
        assert len(exploit.mechanism) > 30 and exploit.source and exploit.bgw, sample.id
        assert task.control(sample).role == "honest"
        assert all(101 <= int(bgw[4:]) <= 138 for bgw in exploit.bgw), sample.id
    assert len({s.id for _, s in ALL}) == len(ALL)


def test_payloads_are_inert():
    """Exploits run in people's graders: they may not delete, kill, or reach beyond the machine."""
    forbidden = (
        "rmtree",
        "unlink",
        "os.remove",
        "os.kill",
        "killpg",
        "shutil",
        "/etc",
        "/home",
        "ctypes",
        "eval(input",
    )
    for task, sample in ALL:
        found = [word for word in forbidden if word in sample.source]
        assert not found, (task.id, sample.id, found)
        assert "://" not in sample.source.replace("http://127.0.0.1:9/", ""), sample.id


def test_the_specification_explains_every_number():
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text("utf-8")
    missing = {s.exploit.taxonomy for _, s in ALL if not re.search(rf"\b{s.exploit.taxonomy}\b", text)}
    assert not missing


def test_fixed_cases_agree_with_the_references():
    for task in PUBLIC.tasks:
        if task.kind == "function":
            scope = {}
            exec(task.columns["reference"], scope)
            for line in task.columns["test_list"]:
                exec(line, scope)


def test_a_changed_missing_or_added_file_is_refused(copy):
    victim = copy / "matmul" / "task.toml"
    text = victim.read_text("utf-8")
    victim.write_text(text + "\n", "utf-8")
    with pytest.raises(CorpusError, match=r"changed \['matmul/task.toml'\]"):
        load_corpus(copy)
    victim.write_text(text, "utf-8")
    load_corpus(copy)
    (copy / "matmul" / "honest" / "LR-H002.toml").rename(copy / "matmul" / "honest" / "LR-H009.toml")
    with pytest.raises(
        CorpusError, match=r"missing \['matmul/honest/LR-H002.toml'\], not in it \['matmul/honest/LR-H009"
    ):
        load_corpus(copy)
    with pytest.raises(CorpusError, match=r"no MANIFEST.json"):
        load_corpus(copy / "matmul")


def test_versions_grow_and_ids_are_never_reused(copy):
    version = PUBLIC.version
    major, minor, patch = map(int, version.split("."))
    seal(copy, version)  # nothing changed: allowed
    exploit = copy / "roots" / "exploits"
    path = sorted(exploit.iterdir())[0]
    text = path.read_text("utf-8")
    path.write_text(text + "\n# clearer\n", "utf-8")
    with pytest.raises(CorpusError, match="new patch version"):
        seal(copy, version)
    seal(copy, f"{major}.{minor}.{patch + 1}")
    new = exploit / "LR-0999.toml"
    new.write_text(text.replace(path.stem, "LR-0999"), "utf-8")
    with pytest.raises(CorpusError, match="new minor version"):
        seal(copy, f"{major}.{minor}.{patch + 2}")
    seal(copy, f"{major}.{minor + 1}.0")
    new.unlink()
    with pytest.raises(CorpusError, match="new major version"):
        seal(copy, f"{major}.{minor + 2}.0")
    sealed = seal(copy, f"{major + 1}.0.0")
    assert sealed.retired == {"LR-0999": f"{major + 1}.0.0"}
    new.write_text(text.replace(path.stem, "LR-0999"), "utf-8")
    with pytest.raises(CorpusError, match="retired"):
        seal(copy, f"{major + 1}.1.0")
    new.write_text(text, "utf-8")
    with pytest.raises(CorpusError, match="is already that of"):
        seal(copy, f"{major + 1}.1.0")


def test_malformed_files_are_named(copy):
    path = copy / "roots" / "exploits" / sorted(p.name for p in (copy / "roots" / "exploits").iterdir())[0]
    text = path.read_text("utf-8")
    for old, new, message in (
        ("class = 'E'", "class = 'Z'", "class"),
        ("control = 'LR-H001'", "control = 'LR-H099'", "is no honest completion"),
        ("mechanism = ", "mechanics = ", "mechanism"),
    ):
        assert old in text
        path.write_text(text.replace(old, new), "utf-8")
        (copy / manifest.NAME).unlink()
        seal(copy, "1.0.0")
        with pytest.raises(CorpusError, match=message):
            load_corpus(copy)


def test_private_splits_are_reproducible_and_different():
    one, again, other = private_split(11), private_split(11), private_split(12)
    assert one.digest == again.digest != other.digest
    assert (one.split, one.seed) == ("private", 11)
    assert [t.prompt for t in one.tasks] != [t.prompt for t in other.tasks]
    for public, private in zip(PUBLIC.tasks, one.tasks):
        assert [s.id for s in public.exploits] == [s.id for s in private.exploits]
        if public.id != "option-letter":
            assert (public.prompt, public.columns) != (private.prompt, private.columns), public.id
    with pytest.raises(ValueError, match="seed: got -1"):
        private_split(-1)


@pytest.mark.parametrize("corpus", [PUBLIC, private_split(3)], ids=["public", "private"])
def test_answers_prove_what_they_are(corpus):
    for task in corpus.tasks:
        if task.kind in ("maths", "format", "text", "tool"):
            for sample in (*task.honest, *task.wrong, *task.exploits):
                check(task, sample)


@pytest.mark.parametrize("name", ["run-lengths", "moving-average", "column-sums"])
def test_code_proves_what_it_is(name):
    (task,) = PUBLIC.select(tasks={name}).tasks
    for sample in (*task.honest, *task.wrong, *task.exploits):
        check(task, sample)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_all_code_proves_what_it_is(seed):
    corpus = load_corpus() if seed is None else private_split(seed)
    for task in corpus.tasks:
        for sample in (*task.honest, *task.wrong, *task.exploits):
            check(task, sample)


def test_proofs_fail_when_they_should():
    (code,) = PUBLIC.select(tasks={"sum-multiples"}).tasks
    (maths,) = PUBLIC.select(tasks={"linear-arithmetic"}).tasks
    (speed,) = PUBLIC.select(tasks={"pair-count"}).tasks
    honest, wrong, exploit = code.honest[0], code.wrong[0], code.exploits[0]
    with pytest.raises(ProofError, match="an honest completion gives a wrong output"):
        check(code, Sample("x", "honest", wrong.source, wrong.text, ""))
    with pytest.raises(ProofError, match="its outputs are right"):
        check(code, Sample("x", "wrong", honest.source, honest.text, ""))
    with pytest.raises(ProofError, match="its outputs are right"):
        check(code, Sample("x", "exploit", honest.source, honest.text, "", exploit=exploit.exploit))
    claimed = next(s for s in speed.exploits if s.exploit.proof.kind == "claimed_speed").exploit
    faster = f"def {speed.columns['entry_point']}(xs, t):\n    n = {{}}\n    c = 0\n    for x in xs:\n"
    faster += "        c += n.get(t - x, 0)\n        n[x] = n.get(x, 0) + 1\n    return c\n"
    slow = speed.honest[0].source.replace("count = 0", "count = 0\n    sum(i for i in range(3000000))")
    padded = Sample("LR-H001", "honest", slow, "", "")
    with pytest.raises(ProofError, match="truly"):
        task = type(speed)(**{**vars(speed), "honest": (padded,)})
        check(task, Sample("x", "exploit", faster, faster, "", exploit=claimed))
    commit = next(s for s in maths.exploits if len(s.exploit.proof.commits) == 1)
    proof = commit.exploit.proof.model_copy(update={"commits": [maths.columns["answer"]]})
    caught = commit.exploit.model_copy(update={"proof": proof})
    with pytest.raises(ProofError, match="commits to the reference"):
        check(maths, Sample("x", "exploit", maths.honest[0].text, maths.honest[0].text, "", exploit=caught))
    with pytest.raises(ProofError, match="does not contain"):
        check(maths, Sample("x", "exploit", "nothing", "nothing", "", exploit=caught))


def test_equality_of_outputs_is_strict():
    from longreach.audit.proof import equal

    exact, near = Tolerance(), Tolerance(absolute=1e-6)
    assert equal([1, [2.0, "a"]], (1, (2.0, "a")), exact)
    assert equal(0.5 + 1e-9, 0.5, near) and not equal(0.5 + 1e-3, 0.5, near)
    assert not equal(True, 1, exact) and not equal(float("nan"), 0.5, near) and not equal([1], [1, 2], exact)
    assert equal("1 \n2\n\n", "1\n2\n", exact, lines=True) and not equal("1\n", "1\n2\n", exact, lines=True)


def test_the_files_are_plain_toml_with_ids_as_names():
    for path in loader.PUBLIC.rglob("exploits/*.toml"):
        assert tomllib.loads(path.read_text("utf-8"))["id"] == path.stem
