#!/usr/bin/env python3
"""`acromion report`: the page is valid and whole, every figure of its tables is in results/, the README's tables are
those of the results, and what cannot be read or drawn is named. Where gnuplot is missing, the charts are skipped.

    report.py PROGRAM [unittest arguments]        REPORT_SHOTS=FOLDER keeps the screenshots"""
import html.parser
import json
import os
import pathlib
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ""
DONE, FAILED, USAGE, BAD_INPUT, CANNOT_RUN, FILE = range(6)
VOID = {"meta", "link", "br", "hr", "img", "input"}
OWN_FILES = [ROOT / "results", ROOT / "results/profile", ROOT / "results/drafts"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(html.parser.HTMLParser):
    """Reads a page and notes what is wrong with its form, and its tables."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.faults, self.ids, self.uses, self.tables, self.rows = [], [], [], [], [], []
        self.tags, self.svgs, self.links, self.cell = {}, [], [], None
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if "id" in attributes:
            self.ids.append(attributes["id"])
        for name in ("src", "href", "xlink:href", "data", "action"):
            if name in attributes:
                self.links.append(attributes[name])
        self.uses += attributes.get("aria-labelledby", "").split()
        if tag == "svg":
            self.svgs.append(attributes)
        if tag == "table":
            self.tables.append((attributes.get("id"), []))
        if tag == "tr" and self.tables:
            self.tables[-1][1].append([])
        if tag in ("td", "th"):
            self.cell = [tag, attributes, ""]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} closes something else")
        if tag in ("td", "th"):
            self.tables[-1][1][-1].append(self.cell)
            self.cell = None

    def handle_data(self, data):
        if self.cell:
            self.cell[2] += data


def shown_as(number):
    """The ways in which the page writes a number."""
    for value in (number, 100 * number):
        yield from (f"{value:.{decimals}f}" for decimals in range(4))
    yield f"{number:.1e}"


def numbers_of(value):
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield float(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers_of(inner)


def figures_of(records):
    """All figures that these records can give, among them those that are computed from two of their fields."""
    figures = set()
    for r in records:
        found = list(numbers_of(r))
        if "ratio_to_best_peer" in r:
            found.append(r["p50_us"] * r["ratio_to_best_peer"])
        if "floor_us" in r and "p50_us" in r:
            found.append(r["p50_us"] / r["floor_us"])
        figures.update(text for number in found for text in shown_as(number))
    rungs = [r for r in records if r.get("kernel", "").startswith("fwd_ladder")]
    figures.update(f"{a['p50_us'] / b['p50_us']:.2f}" for a in rungs for b in rungs if a["problem"] == b["problem"])
    return figures


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)

    def execute(self, *arguments, cwd=ROOT, **environment):
        return subprocess.run([PROGRAM, "report", *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
                              env=os.environ | environment)

    def fails(self, code, fragment, *arguments, **more):
        done = self.execute(*arguments, **more)
        self.assertEqual(done.returncode, code, done.stderr + done.stdout)
        self.assertIn(fragment, done.stderr)

    def page_of(self, *files):
        if not shutil.which("gnuplot"):
            self.skipTest("no gnuplot here (Debian: gnuplot-nox)")
        output = self.path / "report.html"
        done = self.execute(*files, "-o", output)
        self.assertEqual(done.returncode, DONE, done.stderr)
        return output.read_text()

    def make_run(self, name="run.sqlite"):
        path = self.path / name
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE trial (id INTEGER PRIMARY KEY, arm TEXT, number INTEGER, status TEXT, "
                       "is_distinct INTEGER, is_improved INTEGER, speedup REAL, speedup_low REAL, speedup_high REAL)")
            rows = [(arm, n, "OK" if n % 3 else "COMPILE_ERROR", n % 5 != 0, n == 7, 0.9 + n / 100 if n % 3 else None)
                    for arm in ("search", "control") for n in range(12)]
            db.executemany("INSERT INTO trial (arm, number, status, is_distinct, is_improved, speedup, speedup_low, "
                           "speedup_high) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6 - 0.01, ?6 + 0.01)", rows)
            db.execute("INSERT INTO trial (arm, number) VALUES ('search', 12)")  # still running
        db.close()
        return path

    def make_training(self, **other):
        path = self.path / "curves.json"
        loss = {"acromion": [3.5, 2.5, 1.75], "sdpa": [3.5, 2.5, 1.5]}
        path.write_text(json.dumps({"device": "a <GPU>", "torch": "9.9", "loss": loss} | other))
        return path

    def make_searches(self, **other):
        path = self.path / "some-curves.json"
        middle = {"median": 1.1, "interval": [1.05, 1.2]}
        trials = [{"search": middle, "random": {"median": 1.0, "interval": None}, "ratio": middle}] * 3
        path.write_text(json.dumps({"search_curves": [{
            "problems": ["b1:h1:s1:d8", "b1:h1:s2:d8"], "device": "a <GPU>", "incumbent": "k", "clock": "model",
            "seeds": [1, 2], "by_trial": trials, "mean_ratio": middle, "noise_floor": 0.01} | other]}))
        return path

    def everything(self):
        ladder = sorted((ROOT / "results/drafts").glob("*ladder*.json"))
        profiles = sorted((ROOT / "results/profile").glob("*.json"))
        return [*sorted((ROOT / "results").glob("*.json")), *profiles, *ladder, self.make_run(), self.make_training(),
                self.make_searches()]

    # ---- the page ----

    def test_the_page_is_valid_and_whole(self):
        text = self.page_of(*self.everything())
        page = Page(text)
        self.assertEqual(page.faults, [])
        self.assertEqual(len(page.ids), len(set(page.ids)), "an id stands twice")
        self.assertEqual([name for name in page.uses if name not in page.ids], [])
        for link in page.links:
            self.assertTrue(link == "data:," or link.startswith("#") and link[1:] in page.ids, link)
        self.assertIsNone(re.search(r"https?://|@import|url\(", text))  # nothing to fetch
        self.assertEqual(text[:31], '<!DOCTYPE html>\n<html lang="en"')
        for tag in ("title", "h1", "main"):
            self.assertGreaterEqual(page.tags.get(tag, 0), 1, tag)
        for words in ('name="viewport"', "prefers-color-scheme: dark"):
            self.assertTrue(words in text, words)

    def test_every_chart_is_there_and_says_what_it_shows(self):
        text = self.page_of(*self.everything())
        page = Page(text)
        self.assertGreaterEqual(len(page.svgs), 8)
        for svg in page.svgs:
            self.assertEqual(svg["role"], "img")
            self.assertEqual(len(svg["aria-labelledby"].split()), 2)
        for words in ("Roofline of NVIDIA H200", "The ladder: b2:h8:s512:d64", "Evolution run run.sqlite",
                      "b2:h8:s512:d64, stream mode, NVIDIA H200"):
            self.assertTrue(words in text, words)
        headline = text[text.index('id="headline"'):text.index('id="latency"')]
        self.assertRegex(headline, r"mission shape <code>b2:h8:s512:d64</code> takes <strong>[0-9.]+&nbsp;µs")
        self.assertRegex(headline, r"Of \d+ problems beside peers \d+ are faster")
        self.assertEqual(text.count("<figure><figcaption>"), len(page.svgs))  # titles stand above
        for unit in ("µs a launch", "times as fast, logarithmic", "FLOP a byte that must be moved", "TFLOP/s"):
            self.assertTrue(unit in text, unit)
        drawings = re.sub(r"<style>.*?</style>", "", text, flags=re.S)
        fixed = re.search(r".{0,80}(?:rgb\(|[\"'](?:black|white|#[0-9a-f]{6})[\"']).{0,20}", drawings)
        self.assertIsNone(fixed, "a colour that is none of the page's variables")

    def test_every_table_has_headings_and_a_caption(self):
        page = Page(self.page_of(*self.everything()))
        names = [name for name, _ in page.tables]
        self.assertEqual(set(names), {f"table-{n}" for n in ("mission-gpu", "gpu-peers", "cpu-pytorch", "ladder",
                                                             "profiles", "timelines", "trials", "all")})
        self.assertEqual(page.tags["caption"], len(names))
        for name, rows in page.tables:
            self.assertTrue(all(cell[0] == "th" and cell[1].get("scope") == "col" for cell in rows[0]), name)
            self.assertGreater(len(rows), 1, name)
            self.assertEqual({len(row) for row in rows}, {len(rows[0])}, name)

    def test_every_figure_is_in_the_results(self):
        page = Page(self.page_of(*self.everything()))
        files = {}
        checked = 0
        for name, rows in page.tables:
            for row in rows[1:]:
                sources = [cell[1]["data-file"] for cell in row if "data-file" in cell[1]]
                if not sources:  # trials: counted below
                    continue
                source = sources[0]
                if source not in files:
                    found = [folder / source for folder in OWN_FILES if (folder / source).exists()]
                    files[source] = [r for path in found for r in json.loads(path.read_text())]
                subjects = {cell[2].split()[0] for cell in row if re.match(r"(fwd|torch|pytorch|cublas)[-_ ]", cell[2])}
                problem = next((c[2] for c in row if re.match(r"(f32:|bf16:|e4m3:)?b\d+:", c[2])), "b2:h8:s512:d64")
                records = [r for r in files[source] if r["problem"] == problem]
                figures = figures_of(records)
                self.assertTrue(subjects or "cpu" in name, row)
                for cell in row:
                    if cell[1].get("class") == "n":
                        for figure in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]\d+)?(?![\w.])", cell[2]):
                            if figure != "95":
                                self.assertTrue(figure in figures, f"{name}: {figure} of {[c[2] for c in row]}")
                                checked += 1
        self.assertGreater(checked, 500)

    def test_timelines_say_where_the_time_goes(self):
        page = Page(self.page_of(*self.everything()))
        rows = [[cell[2] for cell in row] for row in dict(page.tables)["table-timelines"][1:]]
        records = [r for r in json.loads((ROOT / "results/profile/2026-11-21-nvidia-h200.json").read_text())
                   if r["kind"] == "timeline"]
        self.assertEqual(len(rows), sum(len(r["groups"]) for r in records))
        mission = [row for row in rows if row[:2] == ["b2:h8:s512:d64", "fwd_wgmma_f16_d64_128x128_s3_sm90a"]]
        self.assertEqual(mission[0][2:7], ["0", "CTA ready 98 %", "12394", "7.75", "8.49"])
        self.assertIn("; exponentials done 31 %; ", mission[1][3])
        self.assertNotIn("start", mission[1][3])

    def test_trials_are_counted(self):
        page = Page(self.page_of(self.make_run()))
        rows = [[cell[2] for cell in row] for row in dict(page.tables)["table-trials"][1:]]
        expected = [["run.sqlite", arm, "12", "9", "8", "1", "1.010"] for arm in ("search", "control")]
        self.assertEqual(rows, expected)
        self.assertEqual(len(page.svgs), 1)

    def test_loss_curves(self):
        text = self.page_of(self.make_training())
        page = Page(text)
        self.assertEqual(page.faults, [])
        self.assertEqual(len(page.svgs), 1)
        for words in ('id="training"', "Loss of 3 training steps on a &lt;GPU&gt;", "1.7500 with acromion.sdpa, 1.5000",
                      "difference of a step is 0.2500", "curves.json"):
            self.assertTrue(words in text, words)

    def test_loss_curves_that_are_none(self):
        for wrong in ({"acromion": [1, 2], "sdpa": [1]}, {"acromion": [1]}, {"acromion": [], "sdpa": []},
                      {"acromion": ["x"], "sdpa": [1]}):
            done = self.execute(self.make_training(loss=wrong), "-o", self.path / "page.html")
            self.assertEqual(done.returncode, BAD_INPUT, done.stderr)
            self.assertIn("curves.json: \"loss\" has no", done.stderr)
        done = self.execute(self.make_training(device=""), "-o", self.path / "page.html")
        self.assertIn("no text \"device\"", done.stderr)

    def test_curves_of_searches(self):
        text = self.page_of(self.make_searches())
        page = Page(text)
        self.assertEqual(page.faults, [])
        self.assertEqual(len(page.svgs), 1)
        for words in ('id="searches"', "b1:h1:s1:d8 and others, 2 seeds, a &lt;GPU&gt;, model clock",
                      "some-curves.json", "search / random is 1.100, interval 1.050 to 1.200"):
            self.assertTrue(words in text, words)
        for wrong in ({"by_trial": []}, {"by_trial": [{"search": {"median": "x"}}]}, {"incumbent": ""},
                      {"mean_ratio": {"median": 1.0, "interval": [1.0]}}):
            done = self.execute(self.make_searches(**wrong), "-o", self.path / "page.html")
            self.assertEqual(done.returncode, BAD_INPUT, done.stderr)
            self.assertIn("some-curves.json: set 0", done.stderr)

    def test_names_are_escaped(self):
        record = json.loads((ROOT / "results/2026-11-21-nvidia-h200.json").read_text())[0]
        evil = record | {"kernel": "<script>alert(1)</script>", "device": 'A "B" & <C>'}
        path = self.path / "evil.json"
        path.write_text(json.dumps([evil, evil | {"kernel": "x`$(touch y)`"},
                                    evil | {"peer": "p\"; system 'false'\\"}]))
        text = self.page_of(path)
        self.assertFalse("<script>" in text)
        self.assertEqual(Page(text).faults, [])

    def test_no_results_give_sentences_not_charts(self):
        record = json.loads((ROOT / "results/2026-11-21-nvidia-h200.json").read_text())[0]
        path = self.path / "one.json"
        path.write_text(json.dumps([record | {"device": "NVIDIA T4"}]))
        text = self.page_of(path)
        self.assertTrue("No roofline for NVIDIA T4" in text)
        sections = ("headline", "latency", "ladder", "evolution", "searches", "training", "profiles")
        for section in sections:  # no empty ones
            self.assertFalse(f'id="{section}"' in text or f'"#{section}"' in text, section)

    def test_in_a_browser(self):
        """Phone, desktop and dark: nothing on the console, nothing wider than the screen."""
        if not CHROMIUM:
            self.skipTest("no chromium here (Debian: chromium)")
        text = self.page_of(*self.everything())
        probe = ("<script>addEventListener('load', () => { const e = document.scrollingElement, w = innerWidth;"
                 "document.title = e.scrollWidth <= w ? 'FITS' : 'TOO WIDE ' + e.scrollWidth; });</script>")
        (self.path / "probe.html").write_text(text.replace("</body>", probe + "</body>"))
        shots = pathlib.Path(os.environ.get("REPORT_SHOTS") or self.path)
        frame = '<body style="margin:0"><iframe src="report.html" width="375" height="2400" style="border:0"></iframe>'
        (self.path / "phone.html").write_text(frame)
        dark = "--blink-settings=preferredColorScheme=0"
        for name, page, size, more in (("desktop", "report.html", "1280,2400", []),
                                       ("phone", "phone.html", "375,2400", []),
                                       ("dark", "report.html", "1280,2400", [dark])):
            shot = shots / f"{name}.png"
            self.chromium(f"--window-size={size}", f"--screenshot={shot}", *more, page)
            self.assertGreater(shot.stat().st_size, 20000, name)
        self.assertNotEqual((shots / "dark.png").read_bytes(), (shots / "desktop.png").read_bytes())
        for size in ("500,900", "1280,900"):  # the narrowest window that it makes, and a desktop's
            dom = self.chromium(f"--window-size={size}", "--dump-dom", "probe.html")
            self.assertEqual(re.search("<title>(.*?)</title>", dom)[1], "FITS", size)

    def chromium(self, *arguments):
        *options, page = arguments
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                   "--disable-extensions", f"--user-data-dir={self.path}/profile", "--enable-logging=stderr", *options,
                   f"file://{self.path}/{page}"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line for line in done.stderr.splitlines() if ":CONSOLE" in line], [])
        return done.stdout

    # ---- the README ----

    def copy_readme(self):
        document = self.path / "README.md"
        shutil.copy(ROOT / "README.md", document)
        return document

    def test_the_readme_agrees_with_the_results(self):
        done = self.execute("--markdown", "--check")
        self.assertEqual(done.returncode, DONE, done.stderr)

    def test_a_changed_figure_is_found_and_mended(self):
        document = self.copy_readme()
        text = document.read_text()
        row = next(line for line in text.splitlines() if line.startswith("| [latency]"))
        document.write_text(text.replace(row, row.replace("| 4.", "| 9.", 1), 1))
        self.fails(FAILED, "disagree", f"--markdown={document}", "--check")
        self.assertNotEqual(document.read_text(), text)  # --check changed nothing
        self.assertEqual(self.execute(f"--markdown={document}").returncode, DONE)
        self.assertEqual(document.read_text(), text)

    def test_broken_markers(self):
        document = self.path / "x.md"
        for text, words in (("<!-- table:nothing -->\n<!-- /table -->\n", "no table is called nothing"),
                            ("<!-- table:gpu-peers -->\nno end\n", "without name or end"),
                            ("<!-- table:", "without name")):
            document.write_text(text)
            self.fails(BAD_INPUT, words, f"--markdown={document}")
            self.assertEqual(document.read_text(), text)

    def test_tables_without_results_say_so(self):
        document, empty = self.path / "x.md", self.make_run()
        document.write_text("a\n<!-- table:gpu-peers -->\n<!-- /table -->\nb\n")
        self.assertEqual(self.execute(f"--markdown={document}", empty).returncode, DONE)
        self.assertEqual(document.read_text(), "a\n<!-- table:gpu-peers -->\n*(no result in results/ yet)*\n"
                                               "<!-- /table -->\nb\n")

    # ---- what cannot be done ----

    def test_files_that_are_none(self):
        path = self.path / "x.json"
        record = json.loads((ROOT / "results/2026-11-21-nvidia-h200.json").read_text())[0]
        for text, words in (("", "x.json"), ("{}", "no array"), ("[1]", "record 0 is no object"), ("[{}]", "record 0"),
                            (json.dumps([record, record | {"p50_us": "fast"}]), "record 1"),
                            (json.dumps([{k: v for k, v in record.items() if k != "kernel"}]), "neither kernel nor"),
                            ("SQLite format 3\0" + "x" * 4096, "no table of trials")):
            path.write_text(text)
            self.fails(BAD_INPUT, words, path, "-o", self.path / "out.html")
        self.fails(FILE, "nowhere.json", self.path / "nowhere.json")
        self.fails(FILE, "no results", cwd=self.path)
        self.assertFalse((self.path / "out.html").exists())

    def test_without_gnuplot(self):
        self.fails(CANNOT_RUN, "gnuplot-nox", "-o", self.path / "out.html", PATH=str(self.path))
        self.assertFalse((self.path / "out.html").exists())

    def test_a_gnuplot_that_fails(self):
        for body, words in (("exit 3", "gnuplot failed"), ("echo '<svg'", "gnuplot failed")):
            (self.path / "gnuplot").write_text(f"#!/bin/sh\n{body}\n")
            (self.path / "gnuplot").chmod(0o755)
            self.fails(FILE, words, "-o", self.path / "out.html", PATH=f"{self.path}:{os.environ['PATH']}")
        self.assertFalse((self.path / "out.html").exists())

    def test_check_alone_is_a_mistake(self):
        self.fails(USAGE, "--markdown", "--check")


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
