//! Plots bandwidth and time over the total size, with logarithmic axes.

use plotters::coord::combinators::BindKeyPoints;
use plotters::prelude::*;

use super::row::Row;
use crate::error::{Failure, Result};
use crate::units::Size;

const WIDTH: u32 = 1280;
const HEIGHT: u32 = 560;
const COLOURS: [RGBColor; 7] = [
    RGBColor(31, 90, 180),
    RGBColor(214, 106, 20),
    RGBColor(110, 110, 110),
    RGBColor(40, 140, 60),
    RGBColor(150, 60, 160),
    RGBColor(190, 40, 50),
    RGBColor(20, 150, 160),
];

/// A named line of a plot with its colour.
pub(crate) struct Line {
    name: &'static str,
    colour: RGBColor,
    /// The total bytes and the value of each point that a logarithmic axis can show.
    points: Vec<(f64, f64)>,
}

/// One of two coordinate systems of a plot, with lines over the total size.
pub(crate) struct Panel<'a> {
    pub(crate) caption: &'a str,
    pub(crate) unit: &'a str,
    pub(crate) lines: Vec<Line>,
}

impl Line {
    /// Creates a line with the colour of this index, without points that a logarithmic axis cannot
    /// show.
    pub(crate) fn new(
        name: &'static str,
        index: usize,
        points: impl Iterator<Item = (f64, f64)>,
    ) -> Self {
        let is_shown =
            |(bytes, value): &(f64, f64)| *bytes > 0.0 && *value > 0.0 && value.is_finite();
        Self {
            name,
            colour: COLOURS[index % COLOURS.len()],
            points: points.filter(is_shown).collect(),
        }
    }
}

/// Draws result rows as an SVG file with one panel for bandwidth and one for time.
pub(crate) fn plot(title: &str, rows: &[Row]) -> Result<String> {
    let bandwidth = Panel {
        caption: "Bandwidth",
        unit: "GB/s (10^9 bytes per second)",
        lines: bandwidth_lines(rows),
    };
    let time =
        Panel { caption: "Time of one all-gather", unit: "microseconds", lines: time_lines(rows) };
    panels(title, &bandwidth, &time)
}

/// Draws a panel for bandwidth and a panel for time next to each other as an SVG file.
pub(crate) fn panels(title: &str, bandwidth: &Panel<'_>, time: &Panel<'_>) -> Result<String> {
    render(title, bandwidth, time).map_err(|error| Failure::failed(error.to_string()))
}

fn render(
    title: &str,
    bandwidth: &Panel<'_>,
    time: &Panel<'_>,
) -> std::result::Result<String, Box<dyn std::error::Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        let area = area.titled(title, ("sans-serif", 22))?;
        let (left, right) = area.split_horizontally(WIDTH / 2);
        // All lines rise to the right: the bandwidth panel has room at the lower right, the time panel
        // at the upper left.
        draw(&left, bandwidth, SeriesLabelPosition::LowerRight)?;
        draw(&right, time, SeriesLabelPosition::UpperLeft)?;
        area.present()?;
    }
    Ok(svg)
}

fn bandwidth_lines(rows: &[Row]) -> Vec<Line> {
    let limit = |row: &Row| row.limit.map(|limit| row.total_bytes as f64 / 1000.0 / limit.limit_us);
    vec![
        line("algorithm", 0, rows, |row| Some(row.algbw_gbs)),
        line("bus", 1, rows, |row| Some(row.busbw_gbs)),
        line("algorithm, limit of bare copies", 2, rows, limit),
    ]
}

fn time_lines(rows: &[Row]) -> Vec<Line> {
    vec![
        line("median", 0, rows, |row| Some(row.median_us)),
        line("99th percentile", 1, rows, |row| Some(row.p99_us)),
        line("limit of bare copies", 2, rows, |row| row.limit.map(|limit| limit.limit_us)),
    ]
}

fn line(
    name: &'static str,
    index: usize,
    rows: &[Row],
    value: impl Fn(&Row) -> Option<f64>,
) -> Line {
    let points = rows.iter().filter_map(|row| Some((row.total_bytes as f64, value(row)?)));
    Line::new(name, index, points)
}

fn draw<B>(
    area: &DrawingArea<B, plotters::coord::Shift>,
    Panel { caption, unit, lines }: &Panel<'_>,
    legend: SeriesLabelPosition,
) -> std::result::Result<(), Box<dyn std::error::Error>>
where
    B: DrawingBackend,
    B::ErrorType: 'static,
{
    let points = || lines.iter().flat_map(|line| line.points.iter().copied());
    let (x, x_ticks) = axis(points().map(|(bytes, _)| bytes), 2.0);
    let (y, y_ticks) = axis(points().map(|(_, value)| value), 10.0);
    let mut chart = ChartBuilder::on(area)
        .caption(*caption, ("sans-serif", 19))
        .margin(14)
        .margin_right(36)
        .x_label_area_size(52)
        .y_label_area_size(76)
        .build_cartesian_2d(
            x.log_scale().with_key_points(x_ticks),
            y.log_scale().with_key_points(y_ticks),
        )?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.15))
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 16))
        .x_desc("total size (all blocks)")
        .y_desc(*unit)
        .x_label_formatter(&|bytes| Size(*bytes as u64).to_string())
        .y_label_formatter(&|value| value.to_string())
        .draw()?;
    for line in lines.iter().filter(|line| !line.points.is_empty()) {
        let style = line.colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(line.points.iter().copied(), style))?
            .label(line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
        let dots = line.points.iter().map(|point| Circle::new(*point, 3, line.colour.filled()));
        chart.draw_series(dots)?;
    }
    chart
        .configure_series_labels()
        .position(legend)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 15))
        .draw()?;
    Ok(())
}

/// Returns the range of an axis that contains all values, and at most nine ticks at powers of
/// `base`.
fn axis(values: impl Iterator<Item = f64>, base: f64) -> (std::ops::Range<f64>, Vec<f64>) {
    let (low, high) = values
        .fold((f64::INFINITY, 0.0f64), |(low, high), value| (low.min(value), high.max(value)));
    let (low, high) = if low.is_finite() { (low, high) } else { (1.0, 1.0) };
    let first = low.log(base).floor() as i32;
    let last = (high.log(base).ceil() as i32).max(first + 1);
    let step = (last - first).unsigned_abs().div_ceil(9) as usize;
    let ticks = (first..=last).step_by(step).map(|power| base.powi(power)).collect();
    (base.powi(first)..base.powi(last), ticks)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::row::tests::row;
    use super::*;

    #[test]
    fn both_panels_show_names_units_and_sizes() {
        let rows: Vec<Row> = (0..9)
            .map(|step| {
                let time = Duration::from_nanos(5_000 + (100 << (2 * step)));
                row(1024 << (2 * step), time, Some(time * 9 / 10))
            })
            .collect();
        let svg = plot("all-gather, 4 ranks", &rows).unwrap();
        for text in [
            "all-gather, 4 ranks",
            "Bandwidth",
            "Time of one all-gather",
            "median",
            "99th percentile",
            "limit of bare copies",
            "microseconds",
            "1 KiB",
            "64 MiB",
        ] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }

    #[test]
    fn one_row_of_one_rank_has_no_bus_bandwidth_and_is_drawn() {
        let mut row = row(1024, Duration::from_micros(1), None);
        row.busbw_gbs = 0.0;
        let svg = plot("one", &[row]).unwrap();
        assert!(!svg.contains(">\nbus\n<"));
        assert!(svg.contains("1 KiB"));
        assert!(plot("none", &[]).is_ok());
    }

    #[test]
    fn ticks_are_powers_of_the_base() {
        assert_eq!(
            axis([3.0, 700.0].into_iter(), 10.0),
            (1.0..1000.0, vec![1.0, 10.0, 100.0, 1000.0])
        );
        assert_eq!(axis([5.0].into_iter(), 10.0), (1.0..10.0, vec![1.0, 10.0]));
        assert_eq!(axis(std::iter::empty(), 2.0), (1.0..2.0, vec![1.0, 2.0]));
    }
}
