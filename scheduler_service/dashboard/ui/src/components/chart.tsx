/** ECharts as a component, and the line and bar charts over iterations. */

import { useEffect, useRef } from "preact/hooks";
import { saveCsv } from "../download";
import { type EChartsCoreOption, type EChartsType, init } from "../echarts";
import type { Palette } from "../theme";
import { useView } from "./context";
import { CsvButton, Panel, useTableToggle } from "./panel";
import type { ComponentChildren } from "preact";

interface ChartProps {
  option: EChartsCoreOption;
  /** What a reader who cannot see it should hear. */
  label: string;
  height: number;
  onPick?: (index: number) => void;
}

export function Chart({ option, label, height, onPick }: ChartProps) {
  const host = useRef<HTMLDivElement>(null);
  const chart = useRef<EChartsType | null>(null);
  const pick = useRef(onPick);
  pick.current = onPick;
  useEffect(() => {
    const element = host.current!;
    const instance = init(element, null, { renderer: "canvas" });
    chart.current = instance;
    instance.getZr().on("click", (event: { offsetX: number; offsetY: number }) => {
      const point = [event.offsetX, event.offsetY];
      if (!pick.current || !instance.containPixel("grid", point)) return;
      const position: unknown = instance.convertFromPixel("grid", point);
      if (Array.isArray(position)) pick.current(Math.round(Number(position[0])));
    });
    const observer = new ResizeObserver(() => instance.resize());
    observer.observe(element);
    return () => {
      observer.disconnect();
      instance.dispose();
      chart.current = null;
    };
  }, []);
  useEffect(() => {
    chart.current?.setOption(option, { replaceMerge: ["series", "xAxis", "yAxis"] });
  }, [option]);
  return <div ref={host} class="chart" role="img" aria-label={label} style={{ height: `${height}px` }} />;
}

/** A canvas inherits no font. */
export function pageFont(): string {
  return getComputedStyle(document.body).fontFamily;
}

/** What all charts share: no motion (figures arrive all the time), one tooltip style. */
export function chartBase(palette: Palette): Record<string, unknown> {
  return {
    animation: false,
    textStyle: { fontFamily: pageFont(), color: palette.muted, fontSize: 11 },
    tooltip: {
      confine: true,
      backgroundColor: palette.surface,
      borderColor: palette.line,
      borderWidth: 1,
      padding: [8, 10],
      textStyle: { color: palette.text, fontSize: 12 },
      extraCssText: "box-shadow:0 4px 16px rgb(0 0 0 / .16);border-radius:8px;",
    },
  };
}

export function axisStyle(palette: Palette): Record<string, unknown> {
  return {
    axisLine: { lineStyle: { color: palette.line } },
    axisTick: { show: false },
    axisLabel: { color: palette.muted, fontSize: 11, hideOverlap: true },
    splitLine: { lineStyle: { color: palette.line } },
  };
}

export interface Series {
  name: string;
  values: readonly (number | null)[];
  colour: string;
  dash?: "solid" | "dashed" | "dotted";
  width?: number;
}

interface SeriesPanelProps {
  id: string;
  title: string;
  note?: ComponentChildren;
  className?: string;
  height?: number;
  iterations: readonly number[];
  series: readonly Series[];
  format: (value: number | null) => string;
  /** For the labels of the axis, where it is another. */
  axisFormat?: (value: number) => string;
  /** Log axis: for values that lie orders of magnitude apart. */
  log?: boolean;
  /** On a log axis, what is less is drawn here; tables and downloads keep its value. */
  floor?: number;
  /** Stacked bars instead of lines. */
  stacked?: boolean;
  /** Largest value of the axis. */
  top?: number;
  /** Let the axis start where the values do, instead of at zero. */
  fitted?: boolean;
  controls?: ComponentChildren;
  onPick?: (iteration: number) => void;
}

/** One quantity or several of one unit over iterations: as a chart or as a table, and as CSV. */
export function SeriesPanel(props: SeriesPanelProps) {
  const { id, title, note, className = "", height = 208, iterations, series, format, controls, onPick } = props;
  const { palette, route } = useView();
  const [asTable, toggle] = useTableToggle(id);
  const shown = series.filter((s) => s.values.some((v) => v !== null));
  const download = () =>
    saveCsv(
      `${route.job}-${id}`,
      ["iteration", ...series.map((s) => s.name)],
      iterations.map((n, row) => [n, ...series.map((s) => s.values[row])]),
    );
  return (
    <Panel
      id={id}
      title={title}
      note={note}
      className={className}
      controls={
        <>
          {controls}
          {toggle}
          <CsvButton what={title} onClick={download} />
        </>
      }
    >
      <ul class="legend">
        {shown.map((s) => (
          <li key={s.name}>
            <span class={`swatch ${props.stacked ? "block" : (s.dash ?? "solid")}`} style={{ color: s.colour }} />
            {s.name}
          </li>
        ))}
      </ul>
      {shown.length === 0 ? (
        <div class="hollow" style={{ height: `${height}px` }}>
          Nothing reported yet
        </div>
      ) : asTable ? (
        <SeriesTable title={title} height={height} iterations={iterations} series={shown} format={format} />
      ) : (
        <Chart
          height={height}
          label={spoken(title, shown, format)}
          option={seriesOption({ ...props, series: shown }, palette)}
          {...(onPick
            ? {
                onPick: (index: number) => {
                  const iteration = iterations[index];
                  if (iteration !== undefined) onPick(iteration);
                },
              }
            : {})}
        />
      )}
    </Panel>
  );
}

function spoken(title: string, series: readonly Series[], format: (value: number | null) => string): string {
  const newest = series.map((s) => `${s.name} ${format(s.values.findLast((v) => v !== null) ?? null)}`);
  return `${title}, newest values: ${newest.join(", ")}. The Table button shows all values.`;
}

function seriesOption(props: SeriesPanelProps, palette: Palette): EChartsCoreOption {
  const { iterations, series, format, axisFormat = format, log = false, floor = 0, stacked = false, fitted = false, top } = props;
  const sparse = iterations.length < 3;
  return {
    ...chartBase(palette),
    grid: { left: 4, right: 12, top: 10, bottom: 4, containLabel: true },
    tooltip: {
      ...(chartBase(palette)["tooltip"] as object),
      trigger: "axis",
      axisPointer: { type: stacked ? "shadow" : "line", lineStyle: { color: palette.muted, type: "solid", width: 1 } },
      order: "seriesAsc",
      formatter: (points: { dataIndex: number }[]) => tooltip(props, points[0]?.dataIndex ?? 0),
    },
    xAxis: {
      ...axisStyle(palette),
      axisLabel: { color: palette.muted, fontSize: 11, hideOverlap: false },
      type: "category",
      data: iterations.map(String),
      boundaryGap: stacked || sparse,
    },
    yAxis: {
      ...axisStyle(palette),
      axisLine: { show: false },
      type: log ? "log" : "value",
      scale: fitted,
      ...(fitted || log ? {} : { min: 0 }),
      splitNumber: 4,
      ...(top === undefined ? {} : { max: top, interval: top / 4 }),
      axisLabel: { color: palette.muted, fontSize: 11, hideOverlap: true, formatter: (value: number) => axisFormat(value) },
    },
    series: series.map((s) =>
      stacked
        ? {
            name: s.name,
            type: "bar",
            stack: "all",
            barCategoryGap: iterations.length > 60 ? "0%" : "18%",
            barMaxWidth: 28,
            itemStyle: { color: s.colour },
            data: s.values,
          }
        : {
            name: s.name,
            type: "line",
            showSymbol: sparse,
            symbol: "circle",
            symbolSize: 5,
            connectNulls: false,
            lineStyle: { width: s.width ?? 1.75, type: s.dash ?? "solid", color: s.colour },
            itemStyle: { color: s.colour },
            // A log axis has no place for zero.
            data: log ? s.values.map((v) => (v === null ? null : Math.max(v, floor) || null)) : s.values,
          },
    ),
  };
}

/** All values at one iteration. The names are the pages' own, so they need no escaping. */
function tooltip({ iterations, series, format }: SeriesPanelProps, row: number): string {
  const lines = series.map(
    (s) =>
      `<tr><td style="padding:1px 14px 1px 0;border:0"><span style="color:${s.colour}">■</span> ${s.name}</td>` +
      `<td style="padding:1px 0;border:0;text-align:right">${format(s.values[row] ?? null)}</td></tr>`,
  );
  return `<strong>Iteration ${iterations[row]}</strong><table>${lines.join("")}</table>`;
}

interface SeriesTableProps {
  title: string;
  height: number;
  iterations: readonly number[];
  series: readonly Series[];
  format: (value: number | null) => string;
}

function SeriesTable({ title, height, iterations, series, format }: SeriesTableProps) {
  const rows = iterations.map((_, row) => iterations.length - 1 - row);
  return (
    <div class="scroll" style={{ maxHeight: `${height}px` }} tabIndex={0} role="region" aria-label={`${title}, table`}>
      <table>
        <thead>
          <tr>
            <th scope="col">Iteration</th>
            {series.map((s) => (
              <th key={s.name} scope="col" class="number">
                {s.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={iterations[row]}>
              <th scope="row">{iterations[row]}</th>
              {series.map((s) => (
                <td key={s.name} class="number">
                  {format(s.values[row] ?? null)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
