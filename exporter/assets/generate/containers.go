package main

// containers is a heat map: time from left to right, a row for each container, utilisation and memory as colour.
func containers() *board {
	b := newBoard("containers", "GPU containers", "A row for each container and GPU: how hard it works there, and how much of the memory it holds.", "now-3h",
		"host", "gpu", "container")
	const who = "{{container_name}} on {{gpu_device_uuid}}"
	const by = "host_ip, gpu_device_uuid, container_id, container_name"
	only := work + `,container_id!=""`
	add(b, colours(panel{title: "Utilisation", about: "SM time of each container in percent of a GPU.", unit: percent,
		width: 24, height: 10, queries: []query{{`sum by (` + by + `) (gpu_utilization_percent{` + only + `})`, who}}}, 100))
	add(b, colours(panel{title: "Memory", about: "What each container holds, in percent of the GPU's memory.", unit: percent, width: 24, height: 10, queries: []query{
		{`sum by (` + by + `) (gpu_memory_used_bytes{` + only + `} / gpu_memory_total_bytes{` + only + `}) * 100`, who}}}, 100))
	add(b, rows(panel{title: "Now", about: "The figures behind the colours, with what Docker says of the container.", width: 24, height: 8},
		[][2]string{{"container_name", "Container"}, {"image_name", "Image"}, {"compose_project", "Project"}, {"compose_service", "Service"}, {"gpu_request", "Asked for"}, {"host_ip", "Host"}},
		column{"SM time", percent, `sum by (host_ip, container_id, container_name, image_name) (gpu_utilization_percent{` + only + `})` +
			` * on (host_ip, container_id) group_left (compose_project, compose_service, gpu_request) gpu_container_info{` + cont + `}`},
		column{"Memory", bytes, `sum by (host_ip, container_id, container_name, image_name) (gpu_memory_used_bytes{` + only + `})` +
			` * on (host_ip, container_id) group_left (compose_project, compose_service, gpu_request) gpu_container_info{` + cont + `}`}))
	b.row("In detail")
	add(b, lines(panel{title: "Highest utilisation", about: "Highest of the last minute: what a mean over a scrape hides.", unit: percent, width: 12, height: 8,
		queries: []query{{`max by (` + by + `) (gpu_utilization_max_percent{` + only + `})`, who}}}).Max(100))
	add(b, lines(panel{title: "Host-bound", about: "CPUs at work: busy CPUs beside an idle GPU mean that the host is the bottleneck.", unit: count, width: 12, height: 8,
		queries: []query{{rate(by, "gpu_process_cpu_seconds_total", only), who}}}))
	add(b, lines(panel{title: "Memory bandwidth", about: "Time in which the container read or wrote memory.", unit: percent, width: 12, height: 8,
		queries: []query{{`sum by (` + by + `) (gpu_memory_bandwidth_percent{` + only + `})`, who}}}).Max(100))
	add(b, lines(panel{title: "Power", about: "The GPU's energy, shared out by SM time.", unit: watts, width: 12, height: 8,
		queries: []query{{rate(by, "gpu_energy_joules_total", only), who}}}))
	add(b, lines(panel{title: "Peak of memory (needs the tracer)", about: "Highest of the last minute, from kernel events.", unit: bytes, width: 12, height: 8,
		queries: []query{{`sum by (` + by + `) (gpu_memory_peak_bytes{` + only + `})`, who}}}))
	add(b, lines(panel{title: "Processes that ended (needs the tracer)", about: "By how they ended.", unit: perSecond, width: 12, height: 8,
		queries: []query{{rate("container_name, reason", "gpu_processes_exited_total", cont), "{{container_name}} {{reason}}"}}}))
	return b
}
