/**
 * Ranks × microbatches as one canvas: a column per rank, a row per microbatch, a gap between groups.
 *
 * There is no element per cell, so 40,000 of them cost one redraw of a few milliseconds. Where a pixel is narrower than
 * a rank, it shows the largest value below it.
 */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { LoadMap } from "../api";
import { groupRanks, integer, percent, short } from "../format";
import { degreeColour, inkOn, type Palette, rampColour, type Rgb, rgb } from "../theme";

export type HeatMode = "load" | "tokens" | "degree";

export interface CellAddress {
  rank: number;
  microbatch: number;
}

export interface GroupAddress {
  microbatch: number;
  start: number;
  degree: number;
}

interface HeatMapProps {
  map: LoadMap;
  mode: HeatMode;
  /** Token budget of a rank. */
  budget: number;
  /** Load target Λ, 0 without. */
  target: number;
  palette: Palette;
  /** First and last rank that are shown. */
  range: readonly [number, number];
  onRange: (range: readonly [number, number]) => void;
  selected: GroupAddress | null;
  onPick: (cell: CellAddress) => void;
}

const GUTTER = 44;
const AXIS = 22;
/** Narrower groups are drawn without the gap between them. */
const GAP_FROM_PX = 3;

interface Geometry {
  width: number;
  height: number;
  row: number;
  first: number;
  last: number;
  cell: number;
}

function geometryOf(width: number, microbatches: number, [first, last]: readonly [number, number]): Geometry {
  const row = Math.min(34, Math.max(3, Math.floor(360 / Math.max(1, microbatches))));
  const cell = Math.max(1, width - GUTTER) / (last - first + 1);
  return { width, height: row * microbatches + AXIS, row, first, last, cell };
}

/** What one cell holds, in words. */
export function describeCell(map: LoadMap, { rank, microbatch }: CellAddress, budget: number, target: number): string {
  const degree = map.degree[rank]?.[microbatch] ?? 0;
  const name = `rank ${integer(rank)}, microbatch ${microbatch}`;
  if (degree === 0) return `${name}: no sequence`;
  const load = map.load[rank]![microbatch]!;
  const tokens = map.tokens[rank]![microbatch]!;
  const start = map.start[rank]![microbatch]!;
  const ofTarget = target > 0 ? ` (${percent(load / target, 0)} of Λ)` : "";
  const group = degree > 1 ? `degree ${degree} on ${groupRanks(start, degree)}` : "degree 1, alone";
  return `${name}: load ${short(load)}${ofTarget}, ${integer(tokens)} tokens (${percent(tokens / budget, 0)} of the budget), ${group}`;
}

export function HeatMap(props: HeatMapProps) {
  const { map, mode, budget, target, palette, range, onRange, selected, onPick } = props;
  const host = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const [hover, setHover] = useState<{ cell: CellAddress; x: number; y: number } | null>(null);
  const [cursor, setCursor] = useState<CellAddress | null>(null);
  const [drag, setDrag] = useState<{ from: number; to: number } | null>(null);

  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => setWidth(host.current?.clientWidth ?? 0));
    observer.observe(host.current!);
    setWidth(host.current!.clientWidth);
    return () => observer.disconnect();
  }, []);

  const geometry = geometryOf(width, map.microbatches, range);
  const outlined = selected && `${selected.microbatch}/${selected.start}/${selected.degree}`;
  // Not on every move of the pointer: only when the picture changes.
  useEffect(() => {
    if (width > 0) draw(canvas.current!, geometry, props, cursor);
  }, [width, map, mode, budget, palette, range[0], range[1], outlined, cursor]);

  const rankAt = (x: number): number => {
    const rank = geometry.first + Math.floor((x - GUTTER) / geometry.cell);
    return Math.min(geometry.last, Math.max(geometry.first, rank));
  };
  const cellAt = (event: { offsetX: number; offsetY: number }): CellAddress | null => {
    const microbatch = Math.floor(event.offsetY / geometry.row);
    if (event.offsetX < GUTTER || microbatch < 0 || microbatch >= map.microbatches) return null;
    return { rank: rankAt(event.offsetX), microbatch };
  };
  const onMove = (event: PointerEvent) => {
    if (drag) setDrag({ ...drag, to: rankAt(event.offsetX) });
    const cell = cellAt(event);
    setHover(cell && event.pointerType !== "touch" ? { cell, x: event.offsetX, y: event.offsetY } : null);
  };
  const onUp = (event: PointerEvent) => {
    const dragged = drag;
    setDrag(null);
    if (dragged && Math.abs(dragged.to - dragged.from) * geometry.cell > 12) {
      onRange([Math.min(dragged.from, dragged.to), Math.max(dragged.from, dragged.to)]);
      return;
    }
    const cell = cellAt(event);
    if (cell) {
      setCursor(cell);
      onPick(cell);
    }
  };
  const onKey = (event: KeyboardEvent) => {
    const here = cursor ?? { rank: geometry.first, microbatch: 0 };
    const moves: Record<string, CellAddress> = {
      ArrowLeft: { ...here, rank: here.rank - 1 },
      ArrowRight: { ...here, rank: here.rank + 1 },
      ArrowUp: { ...here, microbatch: here.microbatch - 1 },
      ArrowDown: { ...here, microbatch: here.microbatch + 1 },
      Home: { ...here, rank: 0 },
      End: { ...here, rank: map.ranks - 1 },
    };
    const next = moves[event.key];
    if (next) {
      event.preventDefault();
      const cell = cursor === null ? here : clampCell(next, map);
      setCursor(cell);
      onRange(follow(range, cell.rank));
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (cursor) onPick(cursor);
    } else if (event.key === "+" || event.key === "=") onRange(zoom(range, map.ranks, 0.5, cursor?.rank));
    else if (event.key === "-") onRange(zoom(range, map.ranks, 2, cursor?.rank));
    else if (event.key === "0") onRange([0, map.ranks - 1]);
  };

  const scale = useMemo(
    () => <Scale map={map} mode={mode} budget={budget} target={target} palette={palette} />,
    [map, mode, budget, target, palette],
  );
  const told = hover?.cell ?? cursor;
  const band = drag && {
    left: GUTTER + (Math.min(drag.from, drag.to) - geometry.first) * geometry.cell,
    width: (Math.abs(drag.to - drag.from) + 1) * geometry.cell,
  };
  return (
    <div>
      <div class="heat" ref={host}>
        <canvas
          ref={canvas}
          tabIndex={0}
          role="application"
          aria-roledescription="heat map"
          aria-label={`${mode} of ${plainSize(map)}. Arrow keys move, Enter lists the sequences of a cell, plus and minus zoom. The Table button shows the figures of each microbatch.`}
          style={{ height: `${geometry.height}px` }}
          onPointerDown={(event) => {
            if (event.button === 0 && event.pointerType !== "touch" && cellAt(event)) {
              canvas.current!.setPointerCapture(event.pointerId);
              setDrag({ from: rankAt(event.offsetX), to: rankAt(event.offsetX) });
            }
          }}
          onPointerMove={onMove}
          onPointerUp={onUp}
          onPointerLeave={() => setHover(null)}
          onDblClick={() => onRange([0, map.ranks - 1])}
          onKeyDown={onKey}
        />
        {band && Math.abs(drag.to - drag.from) > 0 && (
          <div class="band" style={{ left: `${band.left}px`, width: `${band.width}px`, height: `${geometry.height - AXIS}px` }} />
        )}
        {hover && !drag && (
          <div
            class="tip"
            aria-hidden="true"
            style={hover.x > width / 2 ? { right: `${width - hover.x + 14}px`, top: `${hover.y + 14}px` } : { left: `${hover.x + 14}px`, top: `${hover.y + 14}px` }}
          >
            <CellFacts map={map} cell={hover.cell} budget={budget} target={target} />
          </div>
        )}
      </div>
      {scale}
      <p class="readout" aria-live="polite">
        {told
          ? describeCell(map, told, budget, target)
          : selected
            ? `Outlined: microbatch ${selected.microbatch}, ${groupRanks(selected.start, selected.degree)}`
            : "Point at a cell, or move with the arrow keys; a click lists its sequences, a drag zooms."}
      </p>
    </div>
  );
}

function plainSize(map: LoadMap): string {
  return `${integer(map.ranks)} ranks by ${integer(map.microbatches)} microbatches`;
}

function clampCell(cell: CellAddress, map: LoadMap): CellAddress {
  return {
    rank: Math.min(map.ranks - 1, Math.max(0, cell.rank)),
    microbatch: Math.min(map.microbatches - 1, Math.max(0, cell.microbatch)),
  };
}

/** The range moved just so far that `rank` is in it. */
function follow([first, last]: readonly [number, number], rank: number): readonly [number, number] {
  if (rank < first) return [rank, last - (first - rank)];
  if (rank > last) return [first + (rank - last), rank];
  return [first, last];
}

/** The range made narrower or wider around `centre`; never less than four ranks. */
export function zoom([first, last]: readonly [number, number], ranks: number, factor: number, centre?: number): readonly [number, number] {
  const size = Math.min(ranks, Math.max(Math.min(4, ranks), Math.round((last - first + 1) * factor)));
  const middle = centre ?? (first + last) / 2;
  const start = Math.min(ranks - size, Math.max(0, Math.round(middle - size / 2)));
  return [start, start + size - 1];
}

function CellFacts({ map, cell, budget, target }: { map: LoadMap; cell: CellAddress; budget: number; target: number }) {
  const { rank, microbatch } = cell;
  const degree = map.degree[rank]![microbatch]!;
  const load = map.load[rank]![microbatch]!;
  const tokens = map.tokens[rank]![microbatch]!;
  const facts: [string, string][] = degree
    ? [
        ["Load", `${short(load)}${target > 0 ? ` · ${percent(load / target, 0)} of Λ` : ""}`],
        ["Tokens", `${integer(tokens)} · ${percent(tokens / budget, 0)} of B`],
        ["Degree", integer(degree)],
        ["Group", groupRanks(map.start[rank]![microbatch]!, degree)],
      ]
    : [["Idle", "no sequence here"]];
  return (
    <>
      <strong>
        Rank {integer(rank)} · MB {microbatch}
      </strong>
      <dl>
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}

function topValue(map: LoadMap, mode: HeatMode, budget: number): number {
  if (mode === "tokens") return budget;
  const matrix = mode === "load" ? map.load : map.degree;
  let top = 0;
  for (const row of matrix) for (const value of row) if (value > top) top = value;
  return top;
}

function Scale({ map, mode, budget, target, palette }: Pick<HeatMapProps, "map" | "mode" | "budget" | "target" | "palette">) {
  const top = topValue(map, mode, budget);
  if (mode === "degree") {
    const degrees = new Set<number>();
    for (const row of map.degree) for (const degree of row) if (degree > 0) degrees.add(degree);
    return (
      <ul class="legend below">
        {[...degrees].sort((a, b) => a - b).map((degree) => (
          <li key={degree}>
            <span class="swatch block" style={{ color: rgb(degreeColour(palette, degree, top)) }} />
            degree {degree}
          </li>
        ))}
      </ul>
    );
  }
  const stops = palette.ramp.map((colour, k) => `${rgb(colour)} ${(k / (palette.ramp.length - 1)) * 100}%`);
  return (
    <div class="scale" aria-hidden="true">
      <span>0</span>
      <span class="bar" style={{ background: `linear-gradient(90deg, ${stops.join(", ")})` }}>
        {mode === "load" && target > 0 && target <= top && <i style={{ left: `${(target / top) * 100}%` }} title="Λ" />}
      </span>
      <span>{mode === "tokens" ? `${integer(budget)} tokens (B)` : `${short(top)} token²/degree`}</span>
      {mode === "load" && target > 0 && <span class="mark">Λ {short(target)}</span>}
    </div>
  );
}

/** Draws all rows, the axes, the outline of the selected group and the cursor. */
function draw(canvas: HTMLCanvasElement, geometry: Geometry, props: HeatMapProps, cursor: CellAddress | null): void {
  const { map, palette, selected } = props;
  const { width, height, row } = geometry;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d")!;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${getComputedStyle(canvas).fontFamily}`;

  const top = topValue(map, props.mode, props.budget);
  for (let microbatch = 0; microbatch < map.microbatches; microbatch++) {
    if (geometry.cell >= 1) drawGroups(context, geometry, props, microbatch, top);
    else drawColumns(context, geometry, props, microbatch, top);
  }
  drawAxes(context, geometry, map.microbatches, palette);
  const outline = (group: GroupAddress, colour: string, line: number) => {
    const left = GUTTER + (Math.max(group.start, geometry.first) - geometry.first) * geometry.cell;
    const right = GUTTER + (Math.min(group.start + group.degree - 1, geometry.last) - geometry.first + 1) * geometry.cell;
    if (right <= left) return;
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(left + 0.5, group.microbatch * row + 0.5, Math.max(2, right - left - 1), row - 1);
  };
  if (selected) outline(selected, palette.orange, 2.5);
  if (cursor) outline({ microbatch: cursor.microbatch, start: cursor.rank, degree: 1 }, palette.text, 2);
}

function colourOf(props: HeatMapProps, value: number, top: number): Rgb {
  if (props.mode === "degree") return degreeColour(props.palette, value, top);
  return rampColour(props.palette, top > 0 ? value / top : 0);
}

function drawGroups(context: CanvasRenderingContext2D, geometry: Geometry, props: HeatMapProps, microbatch: number, top: number): void {
  const { map, mode, palette } = props;
  const { row, first, last, cell } = geometry;
  const y = microbatch * row;
  const tall = row - (row >= 6 ? 1 : 0);
  const matrix = map[mode];
  let rank = first;
  while (rank <= last) {
    const degree = map.degree[rank]![microbatch]!;
    const start = map.start[rank]![microbatch]!;
    const end = Math.min(last, degree > 0 ? start + degree - 1 : rank);
    const x = GUTTER + (rank - first) * cell;
    const size = (end - rank + 1) * cell;
    const gap = size >= GAP_FROM_PX ? 1 : 0;
    if (degree === 0) {
      context.fillStyle = palette.idle;
      context.fillRect(x, y, size - gap, tall);
    } else {
      // Ranks of one group can differ in padding; those that do not are one rectangle, so that no seam shows.
      for (let r = rank; r <= end; ) {
        const same = matrix[r]![microbatch]!;
        const from = GUTTER + (r - first) * cell;
        while (r <= end && matrix[r]![microbatch] === same) r++;
        const to = r > end ? x + size - gap : GUTTER + (r - first) * cell;
        context.fillStyle = rgb(colourOf(props, same, top));
        context.fillRect(from, y, to - from, tall);
      }
      const value = matrix[rank]![microbatch]!;
      const roomy = size >= 90 && mode !== "degree";
      const label = roomy ? `×${degree}  ${short(value)}` : degree > 1 ? `×${degree}` : "";
      if (label && row >= 15 && size >= 30) {
        context.fillStyle = inkOn(colourOf(props, value, top));
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.fillText(label, x + (size - gap) / 2, y + tall / 2 + 0.5);
      }
    }
    rank = end + 1;
  }
}

function drawColumns(context: CanvasRenderingContext2D, geometry: Geometry, props: HeatMapProps, microbatch: number, top: number): void {
  const { map, mode, palette } = props;
  const { row, first, last, cell, width } = geometry;
  const matrix = map[mode];
  const tall = row - (row >= 6 ? 1 : 0);
  for (let x = GUTTER; x < width; x++) {
    const from = first + Math.floor((x - GUTTER) / cell);
    const to = Math.min(last, first + Math.ceil((x + 1 - GUTTER) / cell) - 1);
    let value = 0;
    for (let rank = from; rank <= to; rank++) value = Math.max(value, matrix[rank]![microbatch]!);
    context.fillStyle = value > 0 ? rgb(colourOf(props, value, top)) : palette.idle;
    context.fillRect(x, microbatch * row, 1, tall);
  }
}

function drawAxes(context: CanvasRenderingContext2D, geometry: Geometry, microbatches: number, palette: Palette): void {
  const { row, first, last, cell, height, width } = geometry;
  context.fillStyle = palette.muted;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const every = Math.max(1, Math.ceil(14 / row));
  for (let microbatch = 0; microbatch < microbatches; microbatch += every) {
    context.fillText(`MB ${microbatch}`, GUTTER - 8, microbatch * row + row / 2);
  }
  context.textAlign = "center";
  const step = tickStep((last - first + 1) / Math.max(1, (width - GUTTER) / 64));
  for (let rank = Math.ceil(first / step) * step; rank <= last; rank += step) {
    const x = GUTTER + (rank - first + 0.5) * cell;
    if (x < width - 14) context.fillText(integer(rank), Math.max(x, GUTTER + 4), height - AXIS / 2 + 2);
  }
  context.textAlign = "right";
  context.fillText("rank", GUTTER - 8, height - AXIS / 2 + 2);
}

/** Powers of two, since groups start there. */
function tickStep(least: number): number {
  return 2 ** Math.max(0, Math.ceil(Math.log2(Math.max(1, least))));
}
