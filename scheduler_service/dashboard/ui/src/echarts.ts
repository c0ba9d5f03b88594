/** The parts of ECharts that the pages use, and no others. */

import { BarChart, CustomChart, LineChart } from "echarts/charts";
import { DataZoomInsideComponent, DataZoomSliderComponent, GridComponent, TooltipComponent } from "echarts/components";
import { init, use } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

use([
  BarChart,
  CustomChart,
  LineChart,
  DataZoomInsideComponent,
  DataZoomSliderComponent,
  GridComponent,
  TooltipComponent,
  CanvasRenderer,
]);

export { init };
export type { EChartsCoreOption, EChartsType } from "echarts/core";
export type { CustomSeriesRenderItemAPI, CustomSeriesRenderItemParams } from "echarts";
