"""The distribution of a run over ranks: degrees, process groups, hosts, ZeRO's flat memory, tensor shards."""
