//! Plots time and memory over the number of ranks, with logarithmic axes.

use std::error::Error;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::combinators::BindKeyPoints;
use plotters::prelude::*;

use super::{Record, Row, What, memory, time};

const WIDTH: u32 = 1280;
const HEIGHT: u32 = 960;
const COLOURS: [RGBColor; 6] = [
    RGBColor(31, 90, 180),
    RGBColor(214, 106, 20),
    RGBColor(44, 140, 70),
    RGBColor(170, 50, 60),
    RGBColor(120, 80, 160),
    RGBColor(90, 90, 90),
];

/// A colour, a name and points for each algorithm.
type Lines<'a> = Vec<(RGBColor, &'a str, Vec<(f64, f64)>)>;

/// Returns the plot.
pub(super) fn svg(record: &Record) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        let area = area.titled("Planning and simulating, nodes of 8 ranks", ("sans-serif", 22))?;
        let panels = area.split_evenly((2, 2));
        let seconds = |row: &Row| row.seconds;
        let bytes = |row: &Row| row.peak_bytes as f64;
        let plan = record.series(What::Plan);
        let all = record.series(What::Simulate);
        let as_time = |value: &f64| time(*value);
        let as_memory = |value: &f64| memory(*value);
        panel(&panels[0], "One rank's plan: time", &lines(&plan, seconds), &as_time)?;
        panel(&panels[1], "One rank's plan: memory", &lines(&plan, bytes), &as_memory)?;
        panel(&panels[2], "All ranks, simulated: time", &lines(&all, seconds), &as_time)?;
        panel(&panels[3], "All ranks, simulated: memory", &lines(&all, bytes), &as_memory)?;
        area.present()?;
    }
    Ok(svg)
}

fn lines<'a>(series: &[(&'a str, Vec<&Row>)], value: impl Fn(&Row) -> f64) -> Lines<'a> {
    let points = |rows: &[&Row]| {
        let points = rows.iter().map(|row| (row.ranks as f64, value(row)));
        points.filter(|point| point.1 > 0.0).collect()
    };
    let coloured = series.iter().zip(COLOURS.iter().cycle());
    coloured.map(|((name, rows), &colour)| (colour, *name, points(rows))).collect()
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    caption: &str,
    lines: &Lines<'_>,
    label: &dyn Fn(&f64) -> String,
) -> Result<(), Box<dyn Error>> {
    let points = || lines.iter().flat_map(|(_, _, points)| points.iter().copied());
    let (x, x_ticks) = axis(points().map(|point| point.0), 4.0);
    let (y, y_ticks) = axis(points().map(|point| point.1), 10.0);
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(14)
        .margin_right(30)
        .x_label_area_size(46)
        .y_label_area_size(80)
        .build_cartesian_2d(
            x.log_scale().with_key_points(x_ticks),
            y.log_scale().with_key_points(y_ticks),
        )?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.15))
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 15))
        .x_desc("ranks")
        .x_label_formatter(&|ranks| format!("{ranks:.0}"))
        .y_label_formatter(label)
        .draw()?;
    for (colour, name, points) in lines.iter().filter(|line| !line.2.is_empty()) {
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
        let dots = points.iter().map(|point| Circle::new(*point, 3, colour.filled()));
        chart.draw_series(dots)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 14))
        .draw()?;
    Ok(())
}

/// Returns a range between powers of `base` that holds all values, and the powers as ticks.
fn axis(values: impl Iterator<Item = f64>, base: f64) -> (Range<f64>, Vec<f64>) {
    let (low, high) = values
        .fold((f64::INFINITY, 0.0f64), |(low, high), value| (low.min(value), high.max(value)));
    let (low, high) = if low.is_finite() { (low, high) } else { (1.0, 1.0) };
    let first = low.log(base).floor() as i32;
    let last = (high.log(base).ceil() as i32).max(first + 1);
    let ticks = (first..=last).map(|power| base.powi(power)).collect();
    (base.powi(first)..base.powi(last), ticks)
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;
    use crate::bench::report::Machine;

    #[test]
    fn the_picture_shows_algorithms_ranks_and_units() {
        let mut rows: Vec<Row> = Vec::new();
        for ranks in [8, 64, 512, 4096] {
            rows.push(row(What::Plan, "ring", ranks, ranks as f64 * 1e-7));
        }
        rows.push(row(What::Simulate, "hierarchical", 8, 1e-4));
        let svg = svg(&Record { machine: Machine::default(), rows }).unwrap();
        for text in ["ring", "hierarchical", "ranks", "4096", "µs", "kB"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }

    #[test]
    fn nothing_is_drawn_without_rows() {
        assert!(svg(&Record { machine: Machine::default(), rows: Vec::new() }).is_ok());
    }
}
