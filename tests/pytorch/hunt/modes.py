"""List the modes of the hunt: settings of the budget within which a random loop runs."""

from __future__ import annotations

from rekindle import policies
from tests.differ.modes import MOVED, SPLIT, Mode, by_name

_SAVED = {"evict": "saved"}
_ANYTHING = {"evict": "anything"}
MODES = by_name(
    Mode("unlimited", amount="roomy", weight=0.5),
    Mode("everything evicted", amount="roomy", everything=True, weight=2),
    Mode("tight", weight=4),
    Mode("saved, tight", _SAVED, weight=2),
    Mode("anything, roomy", _ANYTHING, "roomy", weight=0.3),
    Mode("anything, everything evicted", _ANYTHING, "roomy", everything=True, weight=2),
    Mode("anything, tight", _ANYTHING, weight=3),
    Mode("swap", {"swap": "1GiB"}),
    Mode("swap, everything evicted", {"swap": "1GiB"}, "roomy", everything=True),
    Mode("learned", {"learn": "wait"}, weight=1.5),
    Mode("recorded", {"record": True}, weight=0.5),
    Mode("LRU", {"policy": policies.LRU()}, weight=0.5),
    Mode("random", {"policy": policies.Random()}, weight=0.7),
    Mode("DTR", {"policy": policies.DTR()}, weight=0.7),
    Mode("largest", {"policy": policies.Largest()}, weight=0.3),
    Mode("anything, recorded", {**_ANYTHING, "record": True}, weight=0.5),
    Mode("anything, random", {**_ANYTHING, "policy": policies.Random()}, weight=0.5),
    Mode("planned", planned=True, weight=0.1),
    Mode("anything, learned", {**_ANYTHING, "learn": "wait"}, weight=0.7),
    Mode("moved, everything evicted", MOVED, "roomy", everything=True),
    Mode("moved, tight", MOVED, "creeping", weight=1.5),
    Mode("split, tight", SPLIT, weight=2),
    Mode("moved, split, tight", MOVED | SPLIT, "creeping"),
)
