#!/usr/bin/env python3
"""An external proposer for `acromion evolve` that asks a language model behind any OpenAI-compatible chat endpoint.

    export CHAT_URL=http://localhost:8000/v1      # .../chat/completions is added
    export CHAT_MODEL=name-of-the-model
    export CHAT_KEY=...                           # sent as a bearer token; may be unset for a local server
    acromion evolve --proposer "python3 tools/proposers/chat.py" ...

The prompt is made from the request alone. Options: --guidance task,elites,profiles,failures,history,effects,notes,
sources names the parts of the request that the model sees (leave parts out to learn what each is worth: the store keeps
the request, and the answer's rationale says which parts were shown); --temperature; --timeout seconds; --show prints
the prompt instead.
"""
import argparse
import json
import os
import sys
import urllib.error
import urllib.request

PARTS = ["task", "elites", "profiles", "failures", "history", "effects", "notes", "sources"]
ANSWER_BYTES_MAX = 1 << 20

SYSTEM = """You improve attention kernels by measurement. You are given a task, the spaces of parameters that may be \
chosen, and what earlier trials did. Propose ONE trial that has not been tried and is likely to be faster than the \
best. Answer with one JSON object and nothing else, in one of two forms:
{"family": "...", "arch": "...", "parameters": {"NAME": value, ...}, "rationale": "why, in a sentence or two"}
{"name": "lower_case_word", "arch": "...", "source": "the whole kernel source", "descriptor": {...}, "macro": \
"a few words that tell this kind of kernel from others", "rationale": "..."}
Every parameter without a default must be given a listed value, and every rule must hold."""


def section(title, content):
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    return f"## {title}\n{text}\n"


def without_profile(trial):
    return {key: value for key, value in trial.items() if key != "profile"}


def profiles_of(request):
    """What hardware counters say of the incumbent and the elites, where there are some: by trial and problem."""
    trials = [{"id": "the incumbent", **request["task"]["incumbent"]}, *request["elites"]]
    return [{"trial": trial["id"], "problem": p["problem"], "diagnosis": p["diagnosis"], "counters": p["counters"]}
            for trial in trials for p in trial.get("profile", []) if p["status"] == "OK"]


def make_prompt(request, parts):
    """The user's message: the parts of the request that are wanted."""
    texts = [section("Spaces", request["spaces"]), section("Device", request["device"])]
    if "task" in parts:
        task = request["task"]
        texts.append(section("Task", {**task, "incumbent": without_profile(task["incumbent"])}))
    if "elites" in parts:
        texts.append(section("Best trials so far", [without_profile(t) for t in request["elites"]] or "none yet"))
    if "profiles" in parts:
        texts.append(section("What the hardware counters of one launch say", profiles_of(request) or "none were taken"))
    if "failures" in parts:
        texts.append(section("Latest failures", request["failures"] or "none"))
    if "history" in parts:
        texts.append(section("Everything tried", [[t["family"], t["arch"], t["parameters"], t["status"], t["speedup"]]
                                                  for t in request["history"]]))
    if "effects" in parts:
        texts.append(section("What single values did", request["insights"]["effects"] or "nothing is known yet"))
    if "notes" in parts and request["insights"].get("notes"):
        texts.append(section("Notes", request["insights"]["notes"]))
    if "sources" in parts:
        for family, source in request["sources"].items():
            texts.append(section(f"Source of {family}", f"```\n{source}\n```"))
    return "\n".join(texts)


def ask(prompt, options):
    """The model's words."""
    url = os.environ.get("CHAT_URL", "").rstrip("/")
    model = os.environ.get("CHAT_MODEL", "")
    if not url or not model:
        sys.exit("CHAT_URL and CHAT_MODEL must be set")
    body = {"model": model, "temperature": options.temperature,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]}
    headers = {"Content-Type": "application/json"}
    if os.environ.get("CHAT_KEY"):
        headers["Authorization"] = "Bearer " + os.environ["CHAT_KEY"]
    query = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(query, timeout=options.timeout) as reply:
            document = json.loads(reply.read(ANSWER_BYTES_MAX))
        return document["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:  # its text may say why; the key is in no message of it
        sys.exit(f"the endpoint answered {error.code}: {error.read(300).decode(errors='replace')}")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        sys.exit(f"no usable reply: {type(error).__name__}: {error}")


def find_object(words):
    """The first JSON object in a text, which models like to wrap."""
    decoder = json.JSONDecoder()
    for at, character in enumerate(words):
        if character == "{":
            try:
                found, _ = decoder.raw_decode(words[at:])
                return found
            except ValueError:
                continue
    sys.exit(f"no JSON object in the reply: {words[:200]!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidance", default=",".join(PARTS))
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--timeout", type=float, default=100.0)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    parts = [part for part in options.guidance.split(",") if part]
    unknown = set(parts) - set(PARTS)
    if unknown:
        sys.exit(f"--guidance: unknown: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    prompt = make_prompt(json.load(sys.stdin), parts)
    if options.show:
        print(SYSTEM, prompt, sep="\n\n")
        return
    words = ask(prompt, options)
    answer = find_object(words if isinstance(words, str) else "")
    answer = {key: value for key, value in answer.items()
              if key in {"family", "arch", "parameters", "name", "source", "descriptor", "macro", "rationale",
                      "insight"}}
    reason = answer.get("rationale", "")
    answer["guidance"] = ",".join(parts)
    answer["rationale"] = f"{reason} [model {os.environ['CHAT_MODEL']}, shown: {', '.join(parts)}]"
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
