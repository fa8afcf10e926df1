"""How a run is cut over ranks: degrees, pipeline stages, hosts, ZeRO's flat memory, tensor slices."""
