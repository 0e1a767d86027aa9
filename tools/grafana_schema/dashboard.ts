// What a dashboard of ours may hold: Grafana's own types, narrowed to the panels that we use. Options
// that a file leaves out get Grafana's defaults, so all of them are optional.
import * as raw from '@grafana/schema/dist/types/raw/dashboard/x/types.gen';
import * as barGauge from '@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import * as stat from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import * as table from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import * as timeSeries from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';

type DeepPartial<T> = T extends (infer E)[]
  ? DeepPartial<E>[]
  : T extends object
    ? { [K in keyof T]?: DeepPartial<T[K]> }
    : T;

// A query to Prometheus; the data source's plugin has its types no longer in this package.
interface Target {
  refId: string;
  datasource?: raw.DataSourceRef;
  editorMode?: 'code' | 'builder';
  expr: string;
  legendFormat?: string;
  range?: boolean;
  instant?: boolean;
  exemplar?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
  interval?: string;
  hide?: boolean;
}

type Panel<Kind extends string, Options, Custom> = Omit<
  raw.Panel,
  'type' | 'options' | 'fieldConfig' | 'targets'
> & {
  type: Kind;
  title: string;
  gridPos: raw.GridPos;
  options?: DeepPartial<Options>;
  fieldConfig?: {
    defaults: Omit<raw.FieldConfig, 'custom'> & { custom?: DeepPartial<Custom> };
    overrides: raw.FieldConfigSource['overrides'];
  };
  targets: Target[];
};

// Marks that a query to Prometheus finds; these fields too are those of the data source's plugin.
type Annotation = raw.AnnotationQuery & {
  expr: string;
  step?: string;
  titleFormat?: string;
  textFormat?: string;
};

export type Dashboard = Omit<raw.Dashboard, 'annotations' | 'panels' | 'links' | 'templating'> & {
  uid: string;
  title: string;
  links?: (Pick<raw.DashboardLink, 'title' | 'type'> & Partial<raw.DashboardLink>)[];
  templating?: {
    list: (Omit<raw.VariableModel, 'current'> & {
      // How Grafana itself keeps the text of a query variable.
      definition?: string;
      current?: Partial<raw.VariableOption>;
    })[];
  };
  annotations?: { list: Annotation[] };
  panels: (
    | raw.RowPanel
    | Panel<'timeseries', timeSeries.Options, timeSeries.FieldConfig>
    | Panel<'stat', stat.Options, {}>
    | Panel<'bargauge', barGauge.Options, {}>
    | Panel<'table', table.Options, table.FieldConfig>
  )[];
};
