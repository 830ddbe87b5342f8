"""Policies: which storage to evict. Each heuristic has a file, with its formula and its paper.

A policy gives a score to each storage that may be evicted, and the storage with the lowest score is
evicted. The engine evicts until the next operator fits. The score of the DTR paper is cost / (bytes
* staleness): evict what is cheap to recompute, large, and long unused.
"""

from rekindle._public import publish
from rekindle.policies._advised import Advised as Advised
from rekindle.policies._advised import AdvisedChooser as AdvisedChooser
from rekindle.policies._base import Candidate as Candidate
from rekindle.policies._base import Chooser as Chooser
from rekindle.policies._base import Policy as Policy
from rekindle.policies._named import ABLATIONS as ABLATIONS
from rekindle.policies._named import DEFAULT as DEFAULT
from rekindle.policies._named import NAMED as NAMED
from rekindle.policies._named import PAPER as PAPER
from rekindle.policies._named import named as named
from rekindle.policies._named import policy_of as policy_of
from rekindle.policies._score import Score as Score
from rekindle.policies._score import score_of as score_of
from rekindle.policies.ablation import Ablation as Ablation
from rekindle.policies.dtr import DTR as DTR
from rekindle.policies.largest import Largest as Largest
from rekindle.policies.lru import LRU as LRU
from rekindle.policies.msps import MSPS as MSPS
from rekindle.policies.random import Random as Random
from rekindle.policies.swap import HostLink as HostLink
from rekindle.policies.swap import Swap as Swap
from rekindle.policies.swap import speed as speed
from rekindle.policies.thrifty import Thrifty as Thrifty

publish(__name__, globals().values())
