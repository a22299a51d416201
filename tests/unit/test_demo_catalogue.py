"""The demo's catalogue and queries: what is read from the XML, and a split that leaks nothing."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from grinf.errors import EnvironmentFault
from grinf.jobs.demo import catalogue
from grinf.jobs.demo.catalogue import Catalogue, Item, Note, find_tabular_list, read_catalogue
from grinf.jobs.demo.queries import Query, make_queries, normalise, split_queries

XML = """<?xml version="1.0"?>
<ICD10CM.tabular>
  <version>2026</version>
  <chapter>
    <name>1</name><desc>First</desc>
    <section id="A00-A01">
      <diag>
        <name>A00</name><desc>Runny   nose</desc>
        <includes><note>snivels</note></includes>
        <excludes1><note>dry nose (A01.1, A01.2)</note><note>broken nose (B10.-)</note></excludes1>
        <excludes2><note>see also (A00-A01)</note><note>no code at all</note></excludes2>
        <diag>
          <name>A00.1</name><desc>Stage 1</desc>
          <inclusionTerm><note>The snivels</note><note>Cold</note></inclusionTerm>
          <useAdditionalCode><note>code to identify:</note><note>cause (A01.-)</note></useAdditionalCode>
        </diag>
      </diag>
      <diag>
        <name>A01</name><desc>Dry nose</desc>
        <diag><name>A01.1</name><desc>Dry nose, left</desc></diag>
        <diag><name>A01.2</name><desc>Dry nose, right</desc></diag>
      </diag>
    </section>
  </chapter>
  <chapter>
    <name>2</name><desc>Second</desc>
    <section id="B10"><diag><name>B10</name><desc>Broken nose</desc></diag></section>
  </chapter>
</ICD10CM.tabular>
"""


@pytest.fixture
def tabular_list(tmp_path: Path) -> Path:
    path = tmp_path / "icd10cm-tabular.xml"
    path.write_text(XML)
    return path


def test_items_keep_order_parents_and_chapters(tabular_list):
    items = read_catalogue(tabular_list).items
    assert [item.code for item in items] == ["A00", "A00.1", "A01", "A01.1", "A01.2", "B10"]
    assert items[0] == Item("A00", "Runny nose", None)
    assert items[1] == Item("A00.1", "Stage 1", 0)
    assert [item.parent for item in items] == [None, 0, None, 2, 2, None]


def test_notes_are_synonyms_and_references_that_name_a_code(tabular_list):
    notes = read_catalogue(tabular_list).notes
    assert set(notes) == {
        Note("snivels", 0),
        Note("The snivels", 1),
        Note("Cold", 1),
        Note("dry nose", 3),
        Note("dry nose", 4),
        Note("broken nose", 5),  # `B10.-` means all under B10, so B10.
        Note("cause", 2),
    }


def test_a_reference_outside_of_the_chapters_is_left_out(tabular_list):
    chapter = read_catalogue(tabular_list, frozenset({1}))
    assert len(chapter.items) == 5
    assert "broken nose" not in {note.text for note in chapter.notes}


def test_parent_title(tabular_list):
    whole = read_catalogue(tabular_list)
    assert [whole.parent_title(item) for item in whole.items[:2]] == ["", "Runny nose"]


@pytest.mark.parametrize("text", ["", "<a><b></a>", "<ICD10CM.tabular><chapter/></ICD10CM.tabular>"])
def test_a_broken_file_is_an_environment_fault(tmp_path, text):
    path = tmp_path / "icd10cm-tabular.xml"
    path.write_text(text)
    with pytest.raises(EnvironmentFault) as raised:
        read_catalogue(path)
    assert raised.value.fix == catalogue.REPAIR


def test_a_missing_package_names_the_pip_line(monkeypatch):
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault) as raised:
        find_tabular_list()
    assert raised.value.fix == "pip install 'simple-icd-10-cm==1.5.0'"


def test_the_installed_list_is_read_without_importing_the_package():
    import sys

    if find_spec("simple_icd_10_cm") is None:
        pytest.skip("simple-icd-10-cm is not installed")
    items = read_catalogue(find_tabular_list(), frozenset({3})).items
    assert "simple_icd_10_cm" not in sys.modules
    assert len(items) > 300
    assert {item.code: item.title for item in items}["D50.0"].startswith("Iron deficiency anemia")


def test_queries_merge_notes_of_the_same_words():
    notes = [Note("Dry nose", 2), Note("dry NOSE!", 1), Note("Dry nose", 2), Note("x", 0), Note("Cold", 0)]
    queries = make_queries(Catalogue([], notes))
    assert queries == [Query("Dry nose", (1, 2)), Query("Cold", (0,))]


def _many(count: int) -> Catalogue:
    items = [Item(f"A{n:02}", f"title {n}", None) for n in range(count)]
    titles = [Note(f"Title, {n}", (n + 1) % count) for n in range(0, count, 3)]
    vague = [Note("anything", n) for n in range(4)]
    return Catalogue(items, [*titles, *vague, *(Note(f"query number {n}", n) for n in range(count))])


def test_the_split_leaks_no_text():
    whole = _many(100)
    train, test = split_queries(whole, 1000, seed=0)
    titles = {normalise(item.title) for item in whole.items}
    assert {normalise(query.text) for query in train}.isdisjoint(normalise(query.text) for query in test)
    assert titles.isdisjoint(normalise(query.text) for query in test)
    assert all(len(query.targets) <= 3 for query in test)
    assert sorted(train + test, key=str) == sorted(make_queries(whole), key=str)
    assert len(test) == 20  # A fifth of those that fit.


def test_the_split_depends_on_the_seed_alone():
    first, again, other = (split_queries(_many(60), 10, seed) for seed in (1, 1, 2))
    assert first == again
    assert first[1] != other[1]
    assert len(first[1]) == 10
