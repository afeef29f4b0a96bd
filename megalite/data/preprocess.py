"""Turns a corpus into token files: `PREFIX_KEY_document.bin` and `.idx` for each JSON key.

The key idea: the parent process cuts the input into chunks of whole lines and writes; workers parse and tokenize.
Results are taken in the order of the chunks through a short window, so the output doesn't depend on the number of
workers and memory is bounded. Files appear under their names only when everything went well.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from megalite.config.errors import FlagError, UserError
from megalite.config.schema import TokenizerConfig
from megalite.data.indexed_dataset import IndexedDatasetBuilder, best_dtype
from megalite.data.origin import origin_of
from megalite.data.text_input import Document, Problem, TextChunk, check_keys, expand_inputs, parse_chunk, read_chunks
from megalite.data.tokenizers import Tokenizer, build_tokenizer, require_eod
from megalite.distributed.workers import end_with_parent, signals_blocked

REPORTED_PROBLEMS = 20  # skipped documents reported one by one; the rest is only counted


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, how, and where to write; see the flags of `tools/preprocess_data.py`."""

    inputs: Sequence[str]
    output_prefix: str
    json_keys: Sequence[str] = ("text",)
    append_eod: bool = False
    prepend_bos: bool = False
    workers: int = 1
    on_error: str = "stop"  # or "skip"
    text_documents: str = "file"
    log_interval: int = 1000
    chunk_bytes: int = 1 << 20


@dataclass
class Summary:
    """What was done. Per key: documents, tokens and skipped empty texts. `bad` counts skipped documents."""

    documents: dict[str, int]
    tokens: dict[str, int]
    empty: dict[str, int]
    bad: int = 0
    input_bytes: int = 0  # after decompression
    seconds: float = 0.0

    def __str__(self) -> str:
        seconds = max(self.seconds, 1e-6)
        rate = f"{self.input_bytes / 1e6 / seconds:.1f} MB/s, {sum(self.tokens.values()) / seconds:,.0f} tokens/s"
        keys = (
            f"{key}: {self.documents[key]:,} documents, {self.tokens[key]:,} tokens, {self.empty[key]:,} empty skipped"
            for key in self.documents
        )
        return f"{'; '.join(keys)}; {self.bad:,} bad skipped; {self.seconds:.1f} s, {rate}"


@dataclass(frozen=True)
class EncoderSettings:
    """What a worker needs to know; hashable, so that its tokenizer is built once a process."""

    tokenizer: tuple[tuple[str, Any], ...]
    keys: tuple[str, ...]
    before: tuple[int, ...]  # ids that begin each document
    after: tuple[int, ...]  # and that end it
    dtype: str


@dataclass
class Encoded:
    """One chunk, done. `tokens` and `lengths` have one array per key: all documents joined, and their lengths."""

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    empty: list[int]
    problems: list[Problem] = field(default_factory=list)


def preprocess(
    options: PreprocessOptions, tokenizer_config: TokenizerConfig, report: Callable[[str], None] | None = None
) -> Summary:
    """Writes the token files and returns the counts.

    `report` gets progress and skipped documents, a line at a time. Raises FlagError for flags that can't work and
    UserError for input that can't be read (with file and line) or that holds no text; nothing is left behind then.
    """
    report = report or (lambda line: None)
    paths = _checked(options)
    tokenizer = build_tokenizer(tokenizer_config)
    before = _begin(tokenizer) if options.prepend_bos else ()
    after = (require_eod(tokenizer, "--append-eod"),) if options.append_eod else ()
    if any(tokenizer.template()):
        report(
            "note: documents contain only the ids of the text, without the special tokens that the tokenizer's own "
            "template adds; --prepend-bos and --append-eod add its first ids and the EOD"
        )
    dtype = np.dtype(best_dtype(tokenizer.vocab_size))
    origin = origin_of(tokenizer, tokenizer_config)
    settings = EncoderSettings(
        tokenizer=tuple(dataclasses.asdict(tokenizer_config).items()),
        keys=tuple(options.json_keys),
        before=before,
        after=after,
        dtype=dtype.str,
    )
    chunks = read_chunks(paths, options.text_documents, options.chunk_bytes)
    zeros = dict.fromkeys(options.json_keys, 0)
    summary = Summary(zeros.copy(), zeros.copy(), zeros.copy())
    with ExitStack() as stack:
        builders = [
            stack.enter_context(IndexedDatasetBuilder(f"{options.output_prefix}_{key}_document", dtype, origin))
            for key in options.json_keys
        ]
        results = stack.enter_context(closing(_encode_all(chunks, settings, options.workers)))
        _write_all(results, builders, options, summary, report, total=sum(map(os.path.getsize, paths)))
        _require_documents(options, summary)
    if max(summary.documents.values()) == 1:
        report(
            "note: this is one document, but a split into train, valid and test needs several; "
            "--text-documents paragraph splits plain text at blank lines"
        )
    return summary


def _checked(options: PreprocessOptions) -> list[str]:
    """The input files; FlagError or UserError for options that can't work."""
    paths = expand_inputs(options.inputs)
    check_keys(paths, options.json_keys)
    if not os.path.basename(options.output_prefix):
        raise FlagError(f"--output-prefix {options.output_prefix!r} is a folder; add the start of a file name")
    return paths


def _begin(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What `--prepend-bos` asks for."""
    before, _ = tokenizer.template()
    if not before and tokenizer.bos is None:
        raise FlagError("--prepend-bos: this tokenizer has no begin-of-text id; leave the flag out")
    return tuple(before or [tokenizer.bos])  # type: ignore[list-item]


def _require_documents(options: PreprocessOptions, summary: Summary) -> None:
    for key, count in summary.documents.items():
        if not count:
            raise UserError(
                f"--input {' '.join(options.inputs)}: no text under the key {key!r} "
                f"({summary.empty[key]:,} empty documents, {summary.bad:,} bad ones); nothing is written"
            )


def _write_all(
    results: Iterable[tuple[TextChunk, Encoded]],
    builders: Sequence[IndexedDatasetBuilder],
    options: PreprocessOptions,
    summary: Summary,
    report: Callable[[str], None],
    total: int,
) -> None:
    """Adds every result to the files and to the summary, and shows progress: a bar, or lines where there's none."""
    start = time.perf_counter()
    read, reported = 0, 0
    with tqdm(total=total, unit="B", unit_scale=True, desc="preprocess", disable=None) as bar:
        for chunk, encoded in results:
            _tell_problems(chunk, encoded.problems, options, summary, report)
            for n, key in enumerate(options.json_keys):
                _add_documents(builders[n], encoded.tokens[n], encoded.lengths[n])
                summary.documents[key] += len(encoded.lengths[n])
                summary.tokens[key] += len(encoded.tokens[n])
                summary.empty[key] += encoded.empty[n]
            summary.input_bytes += len(chunk.data)
            summary.seconds = time.perf_counter() - start
            bar.update(chunk.progress)
            read += chunk.progress
            done = max(summary.documents.values())
            if bar.disable and done // options.log_interval > reported:
                reported = done // options.log_interval
                rate = (
                    f"{done / summary.seconds:,.0f} documents/s, {summary.input_bytes / 1e6 / summary.seconds:.1f} MB/s"
                )
                report(f"processed {done:,} documents, {100 * read / max(total, 1):.0f} % of the input ({rate})")


def _tell_problems(
    chunk: TextChunk,
    problems: list[Problem],
    options: PreprocessOptions,
    summary: Summary,
    report: Callable[[str], None],
) -> None:
    for problem in problems:
        message = f"{chunk.path}:{problem.line}: {problem.message}"
        if options.on_error == "stop":
            raise UserError(message)
        if summary.bad < REPORTED_PROBLEMS:
            report(f"skipped {message}")
        summary.bad += 1


def _add_documents(builder: IndexedDatasetBuilder, tokens: np.ndarray, lengths: np.ndarray) -> None:
    start = 0
    for length in lengths.tolist():
        builder.add_document(tokens[start : start + length])
        start += length


def _encode_all(
    chunks: Iterator[TextChunk], settings: EncoderSettings, workers: int
) -> Generator[tuple[TextChunk, Encoded], None, None]:
    """Every chunk with its result, in order. Two chunks a worker are under way at most."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's threads would fight over the workers' cores
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(settings, chunk)
        return
    # Fresh interpreters, not forks: libraries that own threads deadlock in a fork.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    window: deque[tuple[TextChunk, Future[Encoded]]] = deque()
    try:
        for chunk in chunks:
            # Ctrl-C isn't for workers, not even before their first line runs: the parent ends them.
            with signals_blocked(signal.SIGINT):
                window.append((chunk, pool.submit(encode_chunk, settings, chunk)))
            if len(window) > 2 * workers:
                chunk, result = window.popleft()
                yield chunk, result.result()
        for chunk, result in window:
            yield chunk, result.result()
    except (KeyboardInterrupt, GeneratorExit):
        for worker in pool._processes.values():  # no public way: they would finish their chunks first
            worker.kill()
        raise
    except BrokenProcessPool:
        raise UserError(
            f"a worker process was killed near {chunk.path}:{chunk.first_line}; if memory ran out, give fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@functools.cache
def _tokenizer_of(fields: tuple[tuple[str, Any], ...]) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(**dict(fields)))


def encode_chunk(settings: EncoderSettings, chunk: TextChunk) -> Encoded:
    """Parses and tokenizes one chunk. What is wrong with a document is returned, not raised."""
    tokenizer = _tokenizer_of(settings.tokenizer)
    items = list(parse_chunk(chunk, settings.keys))
    rows, problems = _tokenize(tokenizer, [item for item in items if isinstance(item, Document)])
    result = Encoded([], [], [], sorted(problems + [item for item in items if isinstance(item, Problem)]))
    for n in range(len(settings.keys)):
        kept = [[*settings.before, *ids, *settings.after] for ids in rows[n :: len(settings.keys)] if ids]
        lengths = np.array([len(ids) for ids in kept], dtype=np.int64)
        flat = itertools.chain.from_iterable(kept)
        result.tokens.append(np.fromiter(flat, dtype=settings.dtype, count=int(lengths.sum())))
        result.lengths.append(lengths)
        result.empty.append(len(rows) // len(settings.keys) - len(kept))
    return result


def _tokenize(tokenizer: Tokenizer, documents: Sequence[Document]) -> tuple[list[list[int]], list[Problem]]:
    """Ids of all texts, key by key within each document; a document that the tokenizer refuses becomes a Problem."""
    try:
        return _tokenize_texts(tokenizer, [text for document in documents for text in document.texts]), []
    except Exception as error:
        if len(documents) == 1:
            message = str(error) if isinstance(error, UserError) else f"the tokenizer failed: {error!r}"
            return [], [Problem(documents[0].line, message)]
    parts = [_tokenize(tokenizer, [document]) for document in documents]
    return [ids for rows, _ in parts for ids in rows], [problem for _, problems in parts for problem in problems]


def _tokenize_texts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    # A blank text is an empty document, whatever the tokenizer would make of its blanks.
    filled = [text for text in texts if text and not text.isspace()]
    ids = iter(tokenizer.tokenize_alone(filled, special=tokenizer.parse_special_tokens))
    return [next(ids) if text and not text.isspace() else [] for text in texts]
