"""Prompt files: what is read, what is refused and how the refusal reads."""

from pathlib import Path

import pytest

from digen.data.prompts import load_prompts
from digen.errors import DataError

FILES = Path(__file__).parent / "prompts"
EDGE = FILES / "edge"


def texts(name: str, column: str = "prompt") -> list[str]:
    return [prompt.text for prompt in load_prompts(FILES / name, column)]


def refusal(path: Path, column: str = "prompt") -> str:
    with pytest.raises(DataError) as caught:
        load_prompts(path, column)
    assert str(path) in str(caught.value)
    return str(caught.value)


def write(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "count", "unique"),
    [
        ("ocr_test.txt", 1018, 1018),
        ("simple_ocr_animals_digit3.txt", 45, 35),
        ("simple_animals.txt", 45, 45),
        ("drawbench_x5.txt", 1000, 200),
        ("t2i_compbench_color_val.txt", 300, 300),
        ("t2i_compbench_numeracy_val.txt", 300, 300),
        ("vbench_all_dimension_cn.txt", 946, 943),
        ("geneval_evaluation_metadata.jsonl", 553, 553),
        ("geneval_unseen_objects_test_x4.jsonl", 1024, 256),
        ("t2is_first30.jsonl", 30, 30),
        ("edge/bom_crlf_blank.txt", 3, 3),
        ("edge/no_trailing_newline.txt", 2, 2),
        ("edge/unicode_separators.txt", 4, 4),
        ("edge/unicode_mix.txt", 6, 6),
        ("edge/duplicates.txt", 6, 3),
        ("edge/whitespace_edges.txt", 4, 4),
        ("edge/long_line.txt", 2, 2),
        ("edge/ocr_quotes.txt", 7, 7),
        ("edge/metadata_ragged.jsonl", 3, 3),
    ],
)
def test_a_file_has_as_many_prompts_as_rows_and_every_row_is_its_own_prompt(name: str, count: int, unique: int) -> None:
    prompts = load_prompts(FILES / name)
    assert [prompt.id for prompt in prompts] == list(range(count))
    assert len({prompt.text for prompt in prompts}) == unique


def test_a_byte_order_mark_carriage_returns_and_blank_lines_are_no_part_of_a_prompt() -> None:
    assert texts("edge/bom_crlf_blank.txt") == ["a red cube", "a blue sphere", "a green cone"]


def test_a_file_with_crlf_reads_as_the_same_file_with_lf(tmp_path: Path) -> None:
    original = FILES / "t2i_compbench_color_val.txt"
    assert b"\r\n" in original.read_bytes()
    unix = write(tmp_path, "lf.txt", original.read_bytes().replace(b"\r\n", b"\n"))
    old_mac = write(tmp_path, "cr.txt", original.read_bytes().replace(b"\r\n", b"\r"))
    expected = texts(original.name)
    assert [p.text for p in load_prompts(unix)] == [p.text for p in load_prompts(old_mac)] == expected
    assert not any("\r" in text for text in expected)


def test_characters_that_only_look_like_line_ends_do_not_split_a_prompt() -> None:
    assert texts("edge/unicode_separators.txt") == [
        "first half\u2028second half", "next\u0085line mark", "form\ffeed", "para\u2029graph",
    ]  # fmt: skip


def test_composed_and_decomposed_letters_stay_as_they_are() -> None:
    decomposed, composed = texts("edge/unicode_mix.txt")[3:5]
    assert decomposed != composed
    assert "e\u0301" in decomposed
    assert "\u00e9" in composed


def test_outer_white_space_goes_and_inner_stays() -> None:
    assert texts("edge/whitespace_edges.txt") == [
        "leading spaces",
        "trailing spaces",
        "tab at start",
        "inner\ttab stays",
    ]


def test_long_prompts_are_kept_whole() -> None:
    assert len(texts("edge/long_line.txt")[0]) > 99_000
    assert max(len(text) for text in texts("t2is_first30.jsonl")) > 1600


@pytest.mark.parametrize("name", ["only_blank.txt", "empty.txt"])
def test_a_file_without_prompts_is_refused(name: str) -> None:
    assert "no prompts" in refusal(EDGE / name)


def test_latin_1_is_refused_with_line_and_encoding() -> None:
    message = refusal(EDGE / "latin1.txt")
    assert "line 1: byte 0xE9 is not UTF-8 (Latin-1?)" in message


def test_the_line_of_a_wrong_byte_is_counted_in_any_line_end(tmp_path: Path) -> None:
    path = write(tmp_path, "mixed.txt", b"one\r\ntwo\rthree\n\xff\n")
    assert "line 4: byte 0xFF" in refusal(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_utf_16_and_utf_32_are_refused_by_name(tmp_path: Path, encoding: str) -> None:
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    path = write(tmp_path, "wide.txt", mark + "a cat\n".encode(encoding))
    assert f"is UTF-{encoding[4:6]}; save it as UTF-8" in refusal(path)
    assert "is UTF-16" in refusal(EDGE / "utf16le_bom.txt")


def test_a_nul_byte_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "line 1: NUL" in refusal(EDGE / "nul_byte.txt")
    assert "line 2: NUL" in refusal(write(tmp_path, "nul.txt", "a\nb\0\n"))


def test_metadata_are_the_other_keys_and_missing_keys_stay_missing() -> None:
    cups, book, plain = load_prompts(EDGE / "metadata_ragged.jsonl")
    assert cups.text == "a photo of two cups"
    assert cups.metadata["exclude"] == [{"class": "cup", "count": 3}]
    assert set(book.metadata) == {"tag", "include"}
    assert plain.metadata == {}
    rows = load_prompts(FILES / "geneval_evaluation_metadata.jsonl")
    assert sum("exclude" in prompt.metadata for prompt in rows) == 80


def test_every_bad_line_of_a_jsonl_file_is_named_with_its_reason() -> None:
    message = refusal(EDGE / "metadata_bad.jsonl")
    for part in (
        "line 2: not JSON",
        "line 3: no key 'prompt'",
        "line 4: must be an object; got list",
        "line 5: 'prompt' is empty",
        "line 6: 'prompt' must be a text; got 7",
    ):
        assert part in message
    assert "line 1" not in message


def test_of_many_bad_lines_the_first_ten_are_shown(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "bad.jsonl", "{}\n" * 13))
    assert "line 10:" in message
    assert "line 11:" not in message
    assert message.endswith("and 3 more")


@pytest.mark.parametrize("escape", ["\\u0000", "\\ud800"])
def test_text_that_cannot_be_written_as_utf_8_is_refused(tmp_path: Path, escape: str) -> None:
    assert "line 1: 'prompt' has a NUL or half" in refusal(
        write(tmp_path, "half.jsonl", f'{{"prompt": "a{escape}"}}\n')
    )


def test_a_tsv_file_is_read_without_quoting() -> None:
    prompts = load_prompts(FILES / "PartiPrompts.tsv", "Prompt")
    assert len(prompts) == 1632
    assert sum('"' in prompt.text for prompt in prompts) == 22
    assert prompts[0].text == "bond"
    assert prompts[0].metadata["Category"] == "Abstract"
    assert set(prompts[0].metadata) == {"Category", "Challenge", "Note"}


def test_a_wrong_column_is_refused_with_the_nearest_and_all_columns() -> None:
    message = refusal(FILES / "PartiPrompts.tsv")
    assert "data.column: got 'prompt'. Did you mean 'Prompt'? Allowed: Category, Challenge, Note, Prompt." in message


def test_short_rows_of_a_table_lack_columns_and_long_rows_are_refused(tmp_path: Path) -> None:
    short = load_prompts(write(tmp_path, "short.tsv", "prompt\ttag\na cat\n\na dog\tpet\n"))
    assert [dict(prompt.metadata) for prompt in short] == [{}, {"tag": "pet"}]
    assert "line 2: 2 fields, but the header names 1 columns" in refusal(
        write(tmp_path, "long.tsv", "prompt\na cat\tpet\n")
    )
    assert "repeats" in refusal(write(tmp_path, "twice.tsv", "prompt\ta\ta\nx\ty\tz\n"))


def test_a_csv_file_may_quote_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path, "some.csv", 'tag,prompt\r\n"a,b","says ""OPEN""\nbig"\r\n\r\nc,next\u2028one\r\n')
    prompts = load_prompts(path)
    assert [prompt.text for prompt in prompts] == ['says "OPEN"\nbig', "next\u2028one"]
    assert prompts[0].metadata == {"tag": "a,b"}


def test_broken_csv_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "line 3: not CSV" in refusal(write(tmp_path, "open.csv", 'prompt\na cat\n"never closed\n'))


def test_a_missing_file_a_folder_and_an_unknown_ending_are_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    assert "cannot be read: Is a directory" in refusal(tmp_path / "folder.txt")
    assert "'.json'. Did you mean '.jsonl'?" in refusal(write(tmp_path, "prompts.json", "[]"))
