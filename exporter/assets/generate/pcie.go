package main

// pcie is about the link between host and GPU: who moves what, and how much of it that is.
func pcie() *board {
	b := newBoard("pcie", "GPU PCIe", "Bytes over the link of each GPU: who moves them, and the share of what the link can carry.", "now-1h", "host", "gpu", "container")
	// A lane moves about 2^generation x 125 MB/s in each direction.
	link := `max by (host_ip, gpu_device_uuid) (gpu_pcie_link_width_max{` + dev + `}) * 2 ^ max by (host_ip, gpu_device_uuid) (gpu_pcie_link_generation_max{` + dev + `}) * 125000000`
	share := func(by, metric, selector string) string {
		return rate(by, metric, selector) + ` / on (host_ip, gpu_device_uuid) group_left () (` + link + `)`
	}
	add(b, stacked(panel{title: "From host to GPU", about: "Bytes per second of each container. Unattributed is what no probe saw a process copy.", unit: bytesPerSecond, width: 12, height: 9,
		queries: parts(rated("gpu_pci_bandwidth_bytes_total"), dev+`,direction="host_to_device"`)}))
	add(b, stacked(panel{title: "From GPU to host", about: "Bytes per second of each container. Unattributed is what no probe saw a process copy.", unit: bytesPerSecond, width: 12, height: 9,
		queries: parts(rated("gpu_pci_bandwidth_bytes_total"), dev+`,direction="device_to_host"`)}))
	add(b, lines(panel{title: "Share of the link by GPU", about: "Of what the link can carry in that direction at its highest generation and width.", unit: ratio, width: 12, height: 9,
		queries: []query{{share("host_ip, gpu_device_uuid, direction", "gpu_device_pcie_bytes_total", dev), "{{gpu_device_uuid}} {{direction}}"}}}).Max(1))
	add(b, lines(panel{title: "Share of the link by container", about: "Above 30 % for five minutes GPUContainerPCIeHog fires.", unit: ratio, width: 12, height: 9,
		queries: []query{{share("host_ip, gpu_device_uuid, container_name, direction", "gpu_pci_bandwidth_bytes_total", work), "{{container_name}} {{gpu_device_uuid}} {{direction}}"}}}).Max(1))
	add(b, ranking(panel{title: "Top talkers", about: "The ten that move most, in both directions together.", unit: bytesPerSecond, width: 12, height: 9, queries: []query{
		{`topk(10, ` + rate("host_ip, gpu_device_uuid, container_name, process_pid", "gpu_pci_bandwidth_bytes_total", work) + `)`, "{{container_name}} {{process_pid}} {{gpu_device_uuid}}"}}}))
	add(b, rows(panel{title: "Links", about: "A link that is narrower than it can be is badly seated. The generation drops while the GPU idles.", width: 12, height: 9}, deviceLabels,
		column{"Generation", count, `max by (` + byDevice + `) (gpu_pcie_link_generation{` + dev + `})`},
		column{"Highest generation", count, `max by (` + byDevice + `) (gpu_pcie_link_generation_max{` + dev + `})`},
		column{"Width", count, `max by (` + byDevice + `) (gpu_pcie_link_width{` + dev + `})`},
		column{"Highest width", count, `max by (` + byDevice + `) (gpu_pcie_link_width_max{` + dev + `})`},
		column{"Replays", count, `max by (` + byDevice + `) (gpu_pcie_replays_total{` + dev + `})`}))
	return b
}
