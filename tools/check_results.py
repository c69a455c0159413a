#!/usr/bin/env python3
"""Checks every file of results/ (or of the folder given) against docs/measuring.md. Exit code 1 says what is wrong."""
import pathlib
import sys

import results


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else results.RESULTS
    try:
        records = results.load(folder)
    except ValueError as error:
        sys.exit(str(error))
    print(f"{folder.name}: {len(records)} records in {len({r['file'] for r in records})} files, all sound")


if __name__ == "__main__":
    main()
