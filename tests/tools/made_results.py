"""Results as they stand in JSON files, made up: what pictures and reports are tested with."""

from __future__ import annotations

from typing import Any

from tools.bench.figures import ARM_KEYS

MIB = 1 << 20


def made_arm(**figures: Any) -> dict[str, Any]:
    """An arm's object; what is not given was not measured. `spread` and `runs` may be given."""
    made = {**dict.fromkeys(ARM_KEYS), "spread": {}, "plan": None, "runs": [{}]}
    return {**made, "skipped": None, "failed": None, **figures}


def absent(why: str) -> dict[str, Any]:
    """An arm that did not run."""
    return made_arm(runs=[], skipped=why)


def shared(what: str, **more: Any) -> dict[str, Any]:
    """What every result has."""
    return {
        "what": what,
        "model": "/models/tiny",
        "memory": 200 * MIB,
        "machine": {
            "system": "Linux x86_64",
            "cores": 2,
            "ram_bytes": 8 << 30,
            "device": "cpu",
            "link_gbps": 1.25,
            "memory_gbps": 12.5,
        },
        "versions": {"paceline": "0.1.0", "torch": "2.13.0", "accelerate": None},
        "prompts": ["a", "b"],
        "max_tokens": 16,
        "repeats": 3,
        "seed": 0,
        "simulated_link_gbps": None,
        "memory_group": None,
        "notes": ["a note"],
        **more,
    }


def made_decode(what: str = "decode") -> dict[str, Any]:
    """Ours at 6 tokens a second, plain at 2; rounds of 0.2 + 0.5 + 0.01 s, 0.4 s of it the link."""
    ours = made_arm(
        tokens_per_s=6.0,
        draft_s=0.2,
        sweep_s=0.5,
        commit_s=0.01,
        bytes_per_sweep=500_000_000,
        raw_gbps=1.25,
        tau=3.5,
        spread={"tokens_per_s": [5.0, 8.0]},
    )
    return shared(
        what,
        command=f"python -m tools.bench {what} --memory 200MiB",
        arms={
            "paceline": ours,
            "plain": made_arm(tokens_per_s=2.0, spread={"tokens_per_s": [1.5, 2.5]}),
            "transformers": absent("accelerate is not installed"),
        },
        speedup_over={"plain": 3.0, "transformers": None},
        speedup_spread={"plain": [2.5, 3.5]},
        reference="plain",
        lossless=True,
        differing_prompts=[],
        draft_step=None,
    )


def made_overlap() -> dict[str, Any]:
    """Rounds of 0.5 s with drafting ahead and of 0.6 s without; the link takes 0.4 s of either."""

    def arm(round_s: float, draft: float, **more: Any) -> dict[str, Any]:
        return made_arm(
            tokens_per_s=4.0 / round_s,
            round_s=round_s,
            stage_s={"link": 0.4, "draft": draft, "verify": 0.1},
            stage_spread={"link": [0.35, 0.5]},
            overlap_ratio=round_s / 0.4,
            balance=0.4 / draft,
            of_limit=0.4 / round_s,
            tau=3.0,
            tokens_per_round=4.0,
            rounds=20,
            spread={"round_s": [round_s - 0.05, round_s + 0.1]},
            **more,
        )

    ours = arm(0.5, 0.2, draft_ahead_kept=0.5)
    figures = ("round_s", "stage_s", "stage_spread", "overlap_ratio", "balance", "of_limit")
    return shared(
        "overlap",
        arms={"paceline": ours, "no_ahead": arm(0.6, 0.16, draft_ahead_kept=None)},
        **{key: ours[key] for key in figures},
        draft_ahead_kept=0.5,
        draft_ahead_gain=1.2,
        spread={**ours["spread"], "draft_ahead_gain": [1.1, 1.3]},
        differing_prompts=[],
    )


def made_link() -> dict[str, Any]:
    """0.9 of 1.2 GB/s."""
    arm = made_arm(
        raw_gbps=1.2,
        sweep_gbps=0.9,
        saturation=0.75,
        bytes_per_sweep=MIB,
        spread={"raw_gbps": [1.0, 1.5], "sweep_gbps": [0.8, 1.0], "saturation": [0.7, 0.8]},
    )
    return shared("link", arms={"plain": arm}, bits_per_weight_streamed=16.0)


def made_prefill() -> dict[str, Any]:
    """Two lengths, the first bound by the link and the second by compute."""

    def length(ttft_s: float, compute_s: float) -> dict[str, Any]:
        figures = {"ttft_s": ttft_s, "compute_s": compute_s, "link_s": 0.5, "over_longest": 1.25}
        spread = {key: [value * 0.9, value * 1.1] for key, value in figures.items()}
        more = {"sweeps": 1, "peak_memory_bytes": MIB, "runs": []}
        return {**figures, **more, "spread": {**spread, "sweeps": [1, 1]}}

    lengths = {"32": length(0.6, 0.1), "2048": length(2.5, 2.0)}
    return shared(
        "prefill",
        arms={"paceline": {**lengths, "plan": None}},
        context=2049,
        lengths=lengths,
        skipped_lengths={"8000": "beyond the context"},
    )


def made_tree() -> dict[str, Any]:
    """Two formats and temperatures, two budgets; ours_no_noise only where it is not cold."""

    def rule(tokens: float) -> dict[str, Any]:
        spread = {"tokens_per_round": [tokens - 1, tokens + 1]}
        return {"tokens_per_round": tokens, "nodes": 8, "tokens_per_s": 5.0, "spread": spread}

    def rules(heat: str) -> dict[str, Any]:
        made = {"chain": rule(3.0), "ours": rule(5.0)}
        return made | ({} if heat == "0" else {"ours_no_noise": rule(2.0)})

    budgets = {"half": 0.5, "whole": 1.0}
    forms = ("int4", "int8")
    return shared(
        "tree",
        nodes=64,
        budgets=budgets,
        arms={f: {h: {b: rules(h) for b in budgets} for h in ("0", "1")} for f in forms},
        summary={
            form: {
                "ours_over_chain": {"0": {"half": 1.7, "whole": 1.6}},
                "ours_over_subspec": {},
                "sampled_over_greedy": {},
                "noise_gain": {},
            }
            for form in forms
        },
        sweeps={form: {"sweep_s": [0.5, 0.4, 0.6]} for form in forms},
        draft_step_s={form: {"1": 0.01, "4": 0.02} for form in forms},
    )


def made_context() -> dict[str, Any]:
    """Two lengths: own keys and values yield less as the context grows, and take twice as much."""

    def arm(tau: float, stores: int, length: int) -> dict[str, Any]:
        return {
            "tau": tau,
            "tokens_per_round": tau + 1,
            "tokens_per_s": 2 * (tau + 1),
            "draft_step_s": 0.02,
            "kv_bytes": stores * length * MIB,
            "rounds": 9,
            "rows_s": 1.5 if stores == 2 else 0.0,
            "spread": {"tau": [tau - 0.5, tau + 0.5]},
        }

    def length(tokens: int, own: float) -> dict[str, Any]:
        return {"shared": arm(4.0, 1, tokens), "own": arm(own, 2, tokens)}

    lengths = {"512": length(512, 3.0), "2048": length(2048, 1.5)}
    ratios = {"tokens_per_round": 1.25, "tokens_per_s": 1.25, "kv_bytes": 0.5}
    return shared(
        "context",
        arms={name: {key: lengths[key][name] for key in lengths} for name in ("shared", "own")},
        lengths=lengths,
        skipped_lengths={"7000": "beyond the context"},
        shared_over_own={"512": ratios, "2048": {**ratios, "tokens_per_round": 2.0}},
        substitute="int4",
        sweep_s=0.5,
    )


def made_duel(speed: float, plain: float, **more: Any) -> dict[str, Any]:
    """One setting of `budgets` or `links`, predicted twice as fast as it was."""
    return {
        "step": "substitutes",
        "substitute": "int4",
        "predicted_tokens_per_s": 2 * speed,
        "tokens_per_s": speed,
        "tokens_per_round": 4.0,
        "tau": 3.0,
        "measured_over_predicted": 0.5,
        "plain_tokens_per_s": plain,
        "plain_predicted_tokens_per_s": 2 * plain,
        "speedup_over_plain": speed / plain,
        "plain_sweep_gbps": 1.1,
        "lossless": True,
        "differing_prompts": [],
        "failed": {},
        "spread": {"tokens_per_s": [speed - 1, speed + 1]},
        **more,
    }


def made_budgets() -> dict[str, Any]:
    """Three budgets: plain, drafting, all resident."""
    nothing = {"substitute": None, "tau": 0.0, "tokens_per_round": 1.0}
    return shared(
        "budgets",
        memory=None,
        arms={"paceline": {}, "plain": {}},
        budgets={
            str(100 * MIB): made_duel(2.0, 2.0, step="plain", **nothing),
            str(200 * MIB): made_duel(6.0, 2.5),
            str(700 * MIB): made_duel(15.0, 15.0, step="resident", **nothing),
        },
        skipped_budgets={str(900 * MIB): "only 800 MiB are free here"},
    )


def made_links() -> dict[str, Any]:
    """From where speculation pays to where it does not."""
    return shared(
        "links",
        arms={"paceline": {}, "plain": {}},
        links={
            "0.5": made_duel(6.0, 2.0),
            "8": made_duel(12.0, 10.0, lossless=False, differing_prompts=["b"]),
            "50": made_duel(13.0, 13.0),
        },
    )


def made_results() -> dict[str, dict[str, Any]]:
    """One of each, by `what`."""
    made = [made_link(), made_decode(), made_overlap(), made_budgets(), made_links()]
    more = [made_prefill(), made_decode("resident"), made_tree(), made_context()]
    return {one["what"]: one for one in (*made, *more)}
