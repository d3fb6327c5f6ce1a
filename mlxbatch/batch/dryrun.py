"""`mlxbatch run --dry-run`: everything that can be known before a model is loaded."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mlxbatch.batch.index import LineState, read_line
from mlxbatch.batch.manifest import manifest_path, read_manifest
from mlxbatch.batch.output import read_earlier, refuse_differences
from mlxbatch.batch.progress import Reporter
from mlxbatch.batch.prompts import Prompt, tokenize
from mlxbatch.batch.runner import due_lines, pending_lines
from mlxbatch.batch.session import OK, WITH_ERRORS, CheckedInput, RunOptions, check_input, manifest_of, tell_problems
from mlxbatch.batch.source import InputFile
from mlxbatch.config import EngineConfig
from mlxbatch.engine.api import TokenizerLike
from mlxbatch.errors import RequestError

if TYPE_CHECKING:
    from mlxbatch.models.source import LocalModel

MOST_COUNTED = 10_000  # requests that a dry run tokenises: a few seconds


def dry_run(options: RunOptions, reporter: Reporter, tables: Console | None) -> int:
    """Check the input and the output as a run would, say what it would do, and touch nothing.

    Returns the exit code that bad lines alone would give. Raises UsageError as a run would.
    """
    with closing(InputFile(options.input)) as source, closing(reporter):
        options.output.check(source.path, (options.stats, options.trace))
        checked = check_input(source, options, reporter)
        reporter.close()
        tell_problems(checked, reporter)
        if options.output.goes_on and options.output.path is not None:
            earlier = read_manifest(manifest_path(options.output.path))
            refuse_differences(earlier, manifest_of(checked, options), options.output.path)
        if tables is not None:
            tables.print(_table(checked, options))
        return WITH_ERRORS if checked.index.bad else OK


def _table(checked: CheckedInput, options: RunOptions) -> Table:
    index, config = checked.index, options.config
    earlier = read_earlier(options.output, index)
    pending = pending_lines(index, earlier.done, options.limit)
    kinds = [
        f"{count} {name}" for count, name in ((index.chats, "chats"), (index.completions, "completions")) if count
    ]
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("input", f"{checked.source.name}, format {checked.reader.format}")
    table.add_row("requests", f"{index.requests}: {', '.join([*kinds, f'{index.bad} bad lines'])}")
    table.add_row("answers", f"{index.answers}")
    if earlier.records:
        table.add_row("earlier", f"{earlier.answers} answers, {earlier.errors} error records")
    table.add_row("to run", f"{pending.requests}, of which {pending.valid} need the model")
    table.add_row("tokens", _token_line(count_tokens(checked, options, earlier.done), config))
    table.add_row("output", options.output_name)
    table.add_row("model", config.model + (f" at {config.revision}" if config.revision else ""))
    table.add_row(
        "engine",
        f"max_num_seqs {config.max_num_seqs or 'auto'}, max_num_batched_tokens {config.max_num_batched_tokens}, "
        f"block_size {config.block_size}, prefix caching {'on' if config.prefix_caching else 'off'}",
    )
    return table


@dataclass(slots=True)
class TokenCount:
    """Prompt tokens of the requests that are due, the first MOST_COUNTED of them at most."""

    context: int
    requests: int = 0
    tokens: int = 0
    longest: int = 0
    refused: int = 0  # that the chat template refuses
    too_long: int = 0  # that leave no room in the context
    complete: bool = True

    def add(self, prompts: list[Prompt], max_tokens: int) -> None:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        self.requests += 1
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)
        self.too_long += max(lengths) + max_tokens > self.context


def count_tokens(checked: CheckedInput, options: RunOptions, done: bytearray) -> TokenCount | None:
    """None when the model is not on this machine. Its weights stay unloaded."""
    from mlxbatch.models.inventory import find_fetched

    config = options.config
    local = find_fetched(config.model, config.revision)
    if local is None:
        return None
    tokenizer, context = _read_tokenizer(local)
    count = TokenCount(config.max_model_len or context)
    for line, text in due_lines(checked.source, checked.index, done, options.limit):
        if checked.index.states[line] != LineState.VALID:
            continue
        if count.requests == MOST_COUNTED:
            count.complete = False
            break
        item = read_line(checked.reader, line, text)
        try:
            count.add(tokenize(item, tokenizer, config.chat_template_args), item.params.max_tokens or 1)
        except RequestError:
            count.refused += 1
    return count


def _read_tokenizer(local: LocalModel) -> tuple[TokenizerLike, int]:
    """The tokenizer and the context length of a model."""
    from mlxbatch.models.configuration import read_config
    from mlxbatch.models.directory_tokenizer import load_directory_tokenizer
    from mlxbatch.models.gguf_file import read_gguf
    from mlxbatch.models.gguf_tokenizer import build_tokenizer
    from mlxbatch.models.summary import summarize

    context = summarize(local).context or sys.maxsize
    if local.kind == "gguf":
        return build_tokenizer(read_gguf(local.path)), context
    return load_directory_tokenizer(local.path, read_config(local.path)), context


def _token_line(count: TokenCount | None, config: EngineConfig) -> str:
    if count is None:
        return f"not counted: {config.model} is not on this machine yet"
    words = [f"{count.tokens:,} in prompts, {count.longest:,} in the longest"]
    if not count.complete:
        words.append(f"in the first {count.requests:,} requests")
    if count.too_long:
        words.append(f"{count.too_long} requests are beyond the context of {count.context:,}")
    if count.refused:
        words.append(f"{count.refused} are refused by the chat template")
    return "; ".join(words)
