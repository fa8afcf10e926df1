"""How a run is distributed over ranks: degrees, process groups, hosts, ZeRO's flat memory, tensor shards."""
