"""`mlxbatch run --dry-run`: everything that can be known before a model is loaded."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console
from rich.table import Table

from mlxbatch.batch.manifest import manifest_path, read_manifest
from mlxbatch.batch.output import read_earlier, refuse_differences
from mlxbatch.batch.progress import Reporter
from mlxbatch.batch.runner import pending_lines
from mlxbatch.batch.session import OK, WITH_ERRORS, CheckedInput, RunOptions, check_input, manifest_of, tell_problems
from mlxbatch.batch.source import InputFile


def dry_run(options: RunOptions, reporter: Reporter, tables: Console | None) -> int:
    """Check the input and the output as a run would, say what it would do, and touch nothing.

    Returns the exit code that bad lines alone would give. Raises UsageError as a run would.
    """
    with closing(InputFile(options.input)) as source, closing(reporter):
        options.output.check(source.path)
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
    kinds = [f"{index.chats} chats"] * (index.chats > 0) + [f"{index.completions} completions"] * (
        index.completions > 0
    )
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("input", f"{checked.source.name}, format {checked.reader.format}")
    table.add_row("requests", f"{index.requests}: {', '.join([*kinds, f'{index.bad} bad lines'])}")
    table.add_row("answers", f"{index.answers}")
    if earlier.records:
        table.add_row("earlier", f"{earlier.answers} answers, {earlier.errors} error records")
    table.add_row("to run", f"{pending.requests}, of which {pending.valid} need the model")
    table.add_row("output", options.output_name)
    table.add_row("model", config.model + (f" at {config.revision}" if config.revision else ""))
    table.add_row(
        "engine",
        f"max_num_seqs {config.max_num_seqs or 'auto'}, max_num_batched_tokens {config.max_num_batched_tokens}, "
        f"block_size {config.block_size}, prefix caching {'on' if config.prefix_caching else 'off'}",
    )
    return table
