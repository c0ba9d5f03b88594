/** The 1F1B schedule of one pipeline: a row per stage, a bar per forward and backward. */

import { useMemo } from "preact/hooks";
import type { Timeline } from "../api";
import { percent, seconds } from "../format";
import type { CustomSeriesRenderItemAPI, CustomSeriesRenderItemParams, EChartsCoreOption } from "../echarts";
import type { Palette } from "../theme";
import { axisStyle, Chart, chartBase, pageFont } from "./chart";

export function Schedule({ timeline, palette }: { timeline: Timeline; palette: Palette }) {
  const option = useMemo(() => scheduleOption(timeline, palette), [timeline, palette]);
  const height = Math.min(520, 76 + timeline.stages * Math.max(14, Math.min(30, 300 / timeline.stages)));
  const label =
    `Schedule of pipeline ${timeline.pipeline}: ${timeline.stages} stages, ${seconds(timeline.span_s)}, ` +
    `${percent(timeline.pp_bubble)} bubble. The Table button shows the figures of each stage.`;
  return <Chart option={option} label={label} height={height} />;
}

/** Busy time of each stage: what the bars show, as figures. */
export function stageFigures(timeline: Timeline) {
  return Array.from({ length: timeline.stages }, (_, stage) => {
    const operations = timeline.operations.filter((op) => op.stage === stage);
    const total = (kind: "F" | "B") =>
      operations.filter((op) => op.kind === kind).reduce((sum, op) => sum + op.end_s - op.start_s, 0);
    const [forward_s, backward_s] = [total("F"), total("B")];
    return {
      stage,
      forward_s,
      backward_s,
      first_s: operations.reduce((least, op) => Math.min(least, op.start_s), Infinity),
      idle_share: timeline.span_s > 0 ? 1 - (forward_s + backward_s) / timeline.span_s : 0,
    };
  });
}

function scheduleOption(timeline: Timeline, palette: Palette): EChartsCoreOption {
  const rows = timeline.operations.map((op) => [op.start_s, op.end_s, op.stage, op.microbatch, op.kind === "F" ? 0 : 1]);
  const base = chartBase(palette);
  const font = pageFont();
  return {
    ...base,
    grid: { left: 4, right: 16, top: 6, bottom: 34, containLabel: true },
    tooltip: {
      ...(base["tooltip"] as object),
      formatter: ({ value }: { value: number[] }) => {
        const [start, end, stage, microbatch, kind] = value as [number, number, number, number, number];
        return (
          `<strong>${kind ? "Backward" : "Forward"} of MB ${microbatch}</strong><br>stage ${stage}<br>` +
          `${seconds(end - start)}, from ${seconds(start)} to ${seconds(end)}`
        );
      },
    },
    xAxis: {
      ...axisStyle(palette),
      type: "value",
      min: 0,
      max: timeline.span_s,
      splitLine: { show: false },
      axisLabel: {
        color: palette.muted,
        hideOverlap: true,
        showMaxLabel: false,
        formatter: (value: number) => seconds(value, true),
      },
    },
    yAxis: {
      ...axisStyle(palette),
      type: "category",
      inverse: true,
      data: Array.from({ length: timeline.stages }, (_, stage) => `stage ${stage}`),
      axisLine: { show: false },
      splitLine: { show: false },
    },
    dataZoom: [
      // The wheel scrolls the page; with Ctrl it zooms.
      { type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
      {
        type: "slider",
        filterMode: "weakFilter",
        height: 14,
        bottom: 4,
        borderColor: palette.line,
        fillerColor: palette.dark ? "rgb(255 255 255 / .08)" : "rgb(0 0 0 / .06)",
        handleStyle: { color: palette.muted, borderColor: palette.muted },
        moveHandleSize: 0,
        showDataShadow: false,
        showDetail: false,
        brushSelect: false,
      },
    ],
    series: [
      {
        type: "custom",
        clip: true,
        dimensions: ["start", "end", "stage", "microbatch", "kind"],
        encode: { x: [0, 1], y: 2 },
        data: rows,
        renderItem: (_: CustomSeriesRenderItemParams, api: CustomSeriesRenderItemAPI) => bar(api, palette, font),
      },
    ],
  };
}

function bar(api: CustomSeriesRenderItemAPI, palette: Palette, font: string) {
  const stage = api.value(2);
  const [left = 0, middle = 0] = api.coord([api.value(0), stage]);
  const [right = 0] = api.coord([api.value(1), stage]);
  const band = (api.size!([0, 1]) as number[])[1] ?? 12;
  const height = Math.max(2, band - (band > 10 ? 3 : 1));
  const width = Math.max(0.5, right - left - (right - left > 4 ? 1 : 0));
  const backward = api.value(4) === 1;
  return {
    type: "rect" as const,
    shape: { x: left, y: middle - height / 2, width, height, r: width > 8 ? 2 : 0 },
    style: { fill: backward ? palette.backward : palette.forward },
    ...(width >= 16 && height >= 12
      ? {
          textContent: {
            type: "text" as const,
            style: { text: String(api.value(3)), fill: "#10141a", fontSize: 10, fontFamily: font },
          },
          textConfig: { position: "inside" as const },
        }
      : {}),
  };
}
