"""A healthy Ray driver: thousands of tasks, actors that come and go, a placement group, objects that spill. Arguments: rounds, folder."""

import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group


@ray.remote(num_cpus=0.1)
def square(value: int) -> int:
    if value % 50 == 0:
        print(f"task {value}: step {value // 50}", flush=True)
    return value * value


@ray.remote(num_cpus=0.1)
class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, other: int) -> int:
        self.value += other
        return self.value


def main() -> None:
    rounds, folder = int(sys.argv[1]), sys.argv[2]
    # Workers speak at their usual level: at the debug level those of this version crash now and then.
    usual = {"env_vars": {"RAY_BACKEND_LOG_LEVEL": "info"}}
    ray.init(num_cpus=4, include_dashboard=True, _temp_dir=folder, object_store_memory=200_000_000, runtime_env=usual)
    for number in range(rounds):
        print("round", number, sum(ray.get([square.remote(value) for value in range(300)])), flush=True)
        counters = [Counter.remote(start) for start in range(3)]
        print("counted", ray.get([one.add.remote(number) for one in counters]), flush=True)
        del counters
        group = placement_group([{"CPU": 0.1}] * 2)
        ray.get(group.ready())
        remove_placement_group(group)
        held = [ray.put(bytes(20_000_000)) for _ in range(15 if number % 5 == 0 else 2)]
        print("held", len(held), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
