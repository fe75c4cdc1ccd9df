"""One member of a reduction, told by lines of JSON what to do: the other half of test_elastic.py."""

import json
import sys

import torch

from aimaster.wire.training import Reduce
from rl_runtime.elastic import ElasticGroup, ReductionAborted
from rl_runtime.policy.trainer import digest

ELEMENTS = 200_000


def main():
    torch.set_num_threads(1)
    told = []

    def beat():
        if not told:
            told.append(1)
            say(beat="reduce")

    group = ElasticGroup(host="127.0.0.1", beat=beat)
    bucket = torch.full((ELEMENTS,), float(int(sys.argv[1]) + 1))
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "end":
            break
        if order["do"] == "host":
            say(address=group.host(order["epoch"]))
            continue
        told[:] = [1] if order["timeout"] == 10.0 else []
        word = Reduce(
            step=1,
            epoch=order["epoch"],
            rank=order["rank"],
            world=order["world"],
            address=order["address"],
            timeout_seconds=order["timeout"],
        )
        try:
            total = group.reduce(bucket, word, still_wanted=lambda order=order: order["wanted"])
        except ReductionAborted as aborted:
            say(aborted=str(aborted))
            continue
        say(
            sum=float(total[0]),
            digest=digest(total),
            copy=total.data_ptr() != bucket.data_ptr() and float(bucket[0]) == float(int(sys.argv[1]) + 1),
        )
    group.close()


def say(**answer):
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
