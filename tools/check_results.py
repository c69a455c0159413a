#!/usr/bin/env python3
"""Checks every file of results/ and results/profile/ (or of the folder given) against docs/manual/measuring.md. Exit
code 1 says what is wrong."""
import pathlib
import sys

import results


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else results.RESULTS
    try:
        records = results.load(folder)
        profiles = results.load(folder / "profile", results.profile_faults_of)
    except ValueError as error:
        sys.exit(str(error))
    for what, found in (("records", records), ("profiles", profiles)):
        print(f"{folder.name}: {len(found)} {what} in {len({r['file'] for r in found})} files, all sound")


if __name__ == "__main__":
    main()
