package main

import (
	"fmt"

	"github.com/grafana/grafana-foundation-sdk/go/bargauge"
	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/heatmap"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/statushistory"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

// Units of Grafana. A ratio is shown as percent, a percentage as it is.
const (
	ratio, percent, bytes, bytesPerSecond = "percentunit", "percent", "bytes", "binBps"
	watts, joules, celsius, hertz         = "watt", "joule", "celsius", "hertz"
	seconds, count, perSecond, hours      = "s", "short", "ops", "h"
)

// Selectors by the variables of the dashboards: of a device, of a workload, and of a container where there is no device.
const (
	dev  = `host_ip=~"$host",gpu_device_uuid=~"$gpu"`
	work = dev + `,container_name=~"$container"`
	cont = `host_ip=~"$host",container_name=~"$container"`
)

// perGPU names a series of a device, short and unique on a host.
const perGPU = "{{gpu_device_name}} {{gpu_pci_bus_id}}"

var source = common.DataSourceRef{Type: cog.ToPtr("prometheus"), Uid: cog.ToPtr("${datasource}")}

// board is a dashboard that numbers its panels.
type board struct {
	*dashboard.DashboardBuilder
	panels uint32
}

// newBoard makes a dashboard with the variables named: host, gpu, container, instance.
func newBoard(uid, title, about, from string, variables ...string) *board {
	//lint:ignore SA1019 the second version of the schema cannot be imported by the Grafana that most run
	b := &board{DashboardBuilder: dashboard.NewDashboardBuilder(title).Uid("gpu-exporter-"+uid).Description(about).Tags([]string{"gpu-exporter"}).
		Time(from, "now").Refresh("30s").Timezone("browser").Tooltip(dashboard.DashboardCursorSyncCrosshair).
		Link(dashboard.NewDashboardLinkBuilder("GPU dashboards").Type(dashboard.DashboardLinkTypeDashboards).Tags([]string{"gpu-exporter"}).
			IncludeVars(true).KeepTime(true)).
		WithVariable(dashboard.NewDatasourceVariableBuilder("datasource").Label("Prometheus").Type("prometheus"))}
	for _, v := range variables {
		query := map[string]string{
			"host":      `label_values(gpu_up, host_ip)`,
			"gpu":       `label_values(gpu_up{host_ip=~"$host"}, gpu_device_uuid)`,
			"container": `label_values(gpu_container_info{host_ip=~"$host"}, container_name)`,
			"instance":  `label_values(gpu_up{host_ip=~"$host"}, instance)`,
		}[v]
		label := map[string]string{"host": "Host", "gpu": "GPU", "container": "Container"}[v]
		q := dashboard.NewQueryVariableBuilder(v).Label(label).Datasource(source).Query(dashboard.StringOrMap{String: cog.ToPtr(query)}).Multi(true).
			IncludeAll(true).Refresh(dashboard.VariableRefreshOnTimeRangeChanged).Sort(dashboard.VariableSortNaturalAsc).
			Current(dashboard.VariableOption{Text: dashboard.StringOrArrayOfString{ArrayOfString: []string{"All"}},
				Value: dashboard.StringOrArrayOfString{ArrayOfString: []string{"$__all"}}})
		switch v {
		case "container":
			q.AllValue(".*") // what is outside containers has an empty name
		case "instance": // follows the host: the exporter's own families have no host_ip
			q.Hide(dashboard.VariableHideHideVariable)
		}
		b.WithVariable(q)
	}
	return b
}

func (b *board) row(title string) { b.WithRow(dashboard.NewRowBuilder(title)) }

// add puts a panel at the next free place.
func add[P interface {
	cog.Builder[dashboard.Panel]
	Id(uint32) P
}](b *board, p P) {
	b.panels++
	b.WithPanel(p.Id(b.panels))
}

// query is an expression and the name of its series: a legend, or in a table the heading of its column.
type query struct{ expr, name string }

// panel is what all kinds of panels have. Width is of 24 columns.
type panel struct {
	title, about, unit string
	width, height      uint32
	queries            []query
}

// ref names a query of a panel: A, B, …
func ref(i int) string { return string(rune('A' + i)) }

func (p panel) targets(change func(*prometheus.DataqueryBuilder)) []cog.Builder[variants.Dataquery] {
	var list []cog.Builder[variants.Dataquery]
	for i, q := range p.queries {
		t := prometheus.NewDataqueryBuilder().Datasource(source).RefId(ref(i)).Expr(q.expr).LegendFormat(q.name)
		change(t)
		list = append(list, t)
	}
	return list
}

func ranged(q *prometheus.DataqueryBuilder)  { q.Range() }
func instant(q *prometheus.DataqueryBuilder) { q.Instant() }
func tabled(q *prometheus.DataqueryBuilder)  { q.Instant().Format(prometheus.PromQueryFormatTable) }
func bucketed(q *prometheus.DataqueryBuilder) {
	q.Range().Format(prometheus.PromQueryFormatHeatmap)
}

func legend() *common.VizLegendOptionsBuilder {
	return common.NewVizLegendOptionsBuilder().ShowLegend(true).DisplayMode(common.LegendDisplayModeTable).Placement(common.LegendPlacementBottom).
		Calcs([]string{"lastNotNull", "max"})
}

// lines shows series over time.
func lines(p panel) *timeseries.PanelBuilder {
	return timeseries.NewPanelBuilder().Title(p.title).Description(p.about).Unit(p.unit).Span(p.width).Height(p.height).Datasource(source).
		Targets(p.targets(ranged)).Min(0).LineWidth(1).FillOpacity(8).ShowPoints(common.VisibilityModeNever).Legend(legend()).
		Tooltip(common.NewVizTooltipOptionsBuilder().Mode(common.TooltipDisplayModeMulti).Sort(common.SortOrderDescending))
}

// stacked shows parts of a whole over time.
func stacked(p panel) *timeseries.PanelBuilder {
	return lines(p).FillOpacity(60).Stacking(common.NewStackingConfigBuilder().Mode(common.StackingModeNormal).Group("A"))
}

// limit draws a series of a stacked panel as a line of its own.
func limit(p *timeseries.PanelBuilder, name string) *timeseries.PanelBuilder {
	return p.OverrideByName(name, []dashboard.DynamicConfigValue{{Id: "custom.stacking", Value: map[string]string{"mode": "none"}},
		{Id: "custom.fillOpacity", Value: 0}, {Id: "custom.lineStyle", Value: map[string]any{"fill": "dash", "dash": []int{8, 8}}},
		{Id: "color", Value: map[string]string{"mode": "fixed", "fixedColor": "text"}}})
}

// number shows one value large, with its course behind it.
func number(p panel, steps ...dashboard.Threshold) *stat.PanelBuilder {
	return stat.NewPanelBuilder().Title(p.title).Description(p.about).Unit(p.unit).Span(p.width).Height(p.height).Datasource(source).
		Targets(p.targets(ranged)).GraphMode(common.BigValueGraphModeArea).ColorMode(common.BigValueColorModeValue).
		Thresholds(thresholds(steps...)).ReduceOptions(common.NewReduceDataOptionsBuilder().Calcs([]string{"lastNotNull"}))
}

// ranking shows the series now as bars.
func ranking(p panel) *bargauge.PanelBuilder {
	return bargauge.NewPanelBuilder().Title(p.title).Description(p.about).Unit(p.unit).Span(p.width).Height(p.height).Datasource(source).
		Targets(p.targets(instant)).Orientation(common.VizOrientationHorizontal).DisplayMode(common.BarGaugeDisplayModeGradient).Min(0).
		ReduceOptions(common.NewReduceDataOptionsBuilder().Calcs([]string{"lastNotNull"})).
		ColorScheme(dashboard.NewFieldColorBuilder().Mode(dashboard.FieldColorModeIdContinuousGrYlRd))
}

// colours shows a row of coloured cells for each series.
func colours(p panel, full float64) *statushistory.PanelBuilder {
	return statushistory.NewPanelBuilder().Title(p.title).Description(p.about).Unit(p.unit).Span(p.width).Height(p.height).Datasource(source).
		Targets(p.targets(ranged)).MaxDataPoints(100).Min(0).Max(full).ShowValue(common.VisibilityModeNever).
		Legend(common.NewVizLegendOptionsBuilder().ShowLegend(true).DisplayMode(common.LegendDisplayModeList).Placement(common.LegendPlacementBottom)).
		ColorScheme(dashboard.NewFieldColorBuilder().Mode(dashboard.FieldColorModeIdContinuousGrYlRd))
}

// spread shows a classic histogram over time.
func spread(p panel) *heatmap.PanelBuilder {
	return heatmap.NewPanelBuilder().Title(p.title).Description(p.about).Span(p.width).Height(p.height).Datasource(source).Unit(count).
		Targets(p.targets(bucketed)).Calculate(false).YAxis(heatmap.NewYAxisConfigBuilder().Unit(p.unit)).ShowLegend().
		Color(heatmap.NewHeatmapColorOptionsBuilder().Mode(heatmap.HeatmapColorModeScheme).Scheme("Oranges").Steps(64))
}

// newTable begins a table. The schema wants a list of what its footer, which is not shown, would compute.
func newTable() *table.PanelBuilder {
	return table.NewPanelBuilder().Footer(common.NewTableFooterOptionsBuilder().Reducer([]string{}))
}

// column is a query of a table with the unit of its values.
type column struct{ heading, unit, expr string }

// rows shows the series now, one row for each set of labels that the queries share. Labels are shown under the headings given, in order; others are not.
func rows(p panel, labels [][2]string, columns ...column) *table.PanelBuilder {
	order, names, hidden := map[string]int{}, map[string]string{}, map[string]bool{"Time": true}
	for _, l := range labels {
		order[l[0]], names[l[0]] = len(order), l[1]
	}
	for i, c := range columns {
		value := "Value #" + ref(i)
		if len(columns) == 1 {
			value = "Value"
		}
		order[value], names[value] = len(order), c.heading
		p.queries = append(p.queries, query{c.expr, c.heading})
	}
	t := newTable().Title(p.title).Description(p.about).Unit(count).Span(p.width).Height(p.height).Datasource(source).Targets(p.targets(tabled)).
		WithTransformation(dashboard.DataTransformerConfig{Id: "merge", Options: map[string]any{}}).
		WithTransformation(dashboard.DataTransformerConfig{Id: "organize", Options: map[string]any{"indexByName": order, "renameByName": names,
			"excludeByName": hidden}})
	for _, c := range columns {
		t.OverrideByName(c.heading, []dashboard.DynamicConfigValue{{Id: "unit", Value: c.unit}})
	}
	return t
}

// trends shows, for each set of labels, the course of each query as a small line beside its last value.
func trends(p panel, labels [][2]string, columns ...column) *table.PanelBuilder {
	order, names := map[string]int{}, map[string]string{}
	series := map[string]any{}
	for _, l := range labels {
		order[l[0]], names[l[0]] = len(order), l[1]
	}
	for i, c := range columns {
		trend := "Trend #" + ref(i)
		order[trend], names[trend] = len(order), c.heading
		series[ref(i)] = map[string]any{"timeField": "Time", "stat": "lastNotNull"}
		p.queries = append(p.queries, query{c.expr, c.heading})
	}
	t := newTable().Title(p.title).Description(p.about).Unit(count).Span(p.width).Height(p.height).Datasource(source).Targets(p.targets(ranged)).
		MaxDataPoints(200).
		WithTransformation(dashboard.DataTransformerConfig{Id: "timeSeriesTable", Options: series}).
		WithTransformation(dashboard.DataTransformerConfig{Id: "merge", Options: map[string]any{}}).
		WithTransformation(dashboard.DataTransformerConfig{Id: "organize", Options: map[string]any{"indexByName": order, "renameByName": names}})
	for _, c := range columns {
		t.OverrideByName(c.heading, []dashboard.DynamicConfigValue{{Id: "unit", Value: c.unit},
			{Id: "custom.cellOptions", Value: map[string]any{"type": "sparkline", "hideValue": false}}})
	}
	return t
}

// thresholds colours from green on by the steps given.
func thresholds(steps ...dashboard.Threshold) *dashboard.ThresholdsConfigBuilder {
	return dashboard.NewThresholdsConfigBuilder().Mode(dashboard.ThresholdsModeAbsolute).
		Steps(append([]dashboard.Threshold{{Color: "green"}}, steps...))
}

func above(v float64, colour string) dashboard.Threshold {
	return dashboard.Threshold{Value: cog.ToPtr(v), Color: colour}
}

// rate is the change per second of a counter's sum, by the labels given.
func rate(by, metric, selector string) string {
	return fmt.Sprintf(`sum by (%s) (rate(%s{%s}[$__rate_interval]))`, by, metric, selector)
}

// parts are the queries that together make the whole of a family that closes: containers, host processes, and what no process accounts for.
func parts(form func(by, selector string) string, selector string) []query {
	return []query{
		{form("container_name", selector+`,container_id!=""`), "{{container_name}}"},
		{form("host_ip", selector+`,container_id="",process_pid!=""`), "(host processes) {{host_ip}}"},
		{form("host_ip", selector+`,container_id="",process_pid=""`), "(unattributed) {{host_ip}}"},
	}
}
