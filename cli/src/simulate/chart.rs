//! Draws the activity of the lanes of a simulation over time, and the use of the links, as an SVG
//! chart.

use peerlane_planning::cost::Links;
use peerlane_planning::plan::Step;
use peerlane_planning::simulate::{LinkClass, Simulation, Slice};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::error::{Failure, Result};

const WIDTH: i32 = 1280;
/// The width in pixels left of the bars, for the names of the lanes.
const NAMES: i32 = 150;
const RIGHT: i32 = 40;
const TOP: i32 = 70;
const ROW: i32 = 18;
const GAP: i32 = 6;
const TICKS: u64 = 8;
const OWN: RGBColor = RGBColor(110, 110, 110);
const LOCAL: RGBColor = RGBColor(31, 90, 180);
const NETWORK: RGBColor = RGBColor(214, 106, 20);
const WAIT: RGBColor = RGBColor(226, 226, 226);

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A rectangle on the timeline of a lane, for a copy or a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bar {
    row: usize,
    from: i32,
    to: i32,
    /// The link class of a copy; `None` for a wait.
    class: Option<LinkClass>,
}

pub(super) fn chart(title: &str, simulation: &Simulation, links: &Links) -> Result<String> {
    render(title, simulation, links).map_err(|error| Failure::failed(error.to_string()))
}

fn render(
    title: &str,
    simulation: &Simulation,
    links: &Links,
) -> std::result::Result<String, Box<dyn std::error::Error>> {
    let lanes = simulation.tiers.len();
    let ranks = simulation.slices.last().map_or(0, |slice| slice.rank.index() + 1);
    let rows = ranks * lanes;
    let timeline = TOP + rows as i32 * ROW + ranks as i32 * GAP;
    let height = timeline + 150;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32));
        let area = area.into_drawing_area();
        area.fill(&WHITE)?;
        text(&area, title, (14, 14), 20)?;
        legend(&area)?;
        time_axis(&area, simulation.end_ps(), timeline)?;
        for row in 0..rows {
            let name = format!("rank {} lane {}", row / lanes, row % lanes);
            text(&area, &name, (14, top(row, lanes) + 2), 13)?;
        }
        for bar in bars(simulation) {
            let colour = bar.class.map_or(WAIT, colour);
            let top = top(bar.row, lanes) + if bar.class.is_some() { 1 } else { 6 };
            let bottom = top + if bar.class.is_some() { ROW - 3 } else { ROW - 13 };
            rectangle(&area, (bar.from, top), (bar.to, bottom), colour)?;
        }
        used(&area, simulation, links, timeline + 40)?;
        area.present()?;
    }
    Ok(svg)
}

/// Returns the steps as bars that are at least one pixel wide; bars that touch are merged. Waits
/// come first, so that copies are drawn over them.
fn bars(simulation: &Simulation) -> Vec<Bar> {
    let lanes = simulation.tiers.len();
    let mut bars: Vec<Bar> = Vec::new();
    for is_copy_pass in [false, true] {
        for slice in &simulation.slices {
            let class = simulation.link_class(slice);
            let drawn = if is_copy_pass { class.is_some() } else { is_wait(slice) };
            if !drawn {
                continue;
            }
            let from = x_of(slice.begin_ps, simulation.end_ps());
            let to = x_of(slice.end_ps, simulation.end_ps()).max(from + 1);
            let row = slice.rank.index() * lanes + slice.lane.index();
            match bars.last_mut() {
                Some(last)
                    if (last.row, last.class) == (row, class)
                        && from <= last.to
                        && to - last.from <= 4 =>
                {
                    last.to = last.to.max(to);
                }
                _ => bars.push(Bar { row, from, to, class }),
            }
        }
    }
    bars
}

fn is_wait(slice: &Slice) -> bool {
    matches!(slice.step, Step::Wait { .. }) && slice.end_ps > slice.begin_ps
}

fn colour(class: LinkClass) -> RGBColor {
    match class {
        LinkClass::Own => OWN,
        LinkClass::Local => LOCAL,
        LinkClass::Network => NETWORK,
    }
}

fn top(row: usize, lanes: usize) -> i32 {
    TOP + row as i32 * ROW + (row / lanes) as i32 * GAP
}

fn x_of(picoseconds: u64, end: u64) -> i32 {
    let width = u128::from((WIDTH - NAMES - RIGHT).unsigned_abs());
    NAMES + (u128::from(picoseconds) * width / u128::from(end.max(1))) as i32
}

fn time_axis(area: &Area<'_>, end: u64, bottom: i32) -> Drawn {
    for tick in 0..=TICKS {
        let time = (u128::from(end) * u128::from(tick) / u128::from(TICKS)) as u64;
        let x = x_of(time, end);
        area.draw(&PathElement::new([(x, TOP - 4), (x, bottom)], BLACK.mix(0.12)))?;
        let microseconds = time as f64 / 1e6;
        let decimals = if end < 100_000_000 { 1 } else { 0 };
        text(area, &format!("{microseconds:.decimals$} µs"), (x - 22, bottom + 6), 13)?;
    }
    Ok(())
}

fn legend(area: &Area<'_>) -> Drawn {
    let entries = [(OWN, "self copy"), (LOCAL, "local"), (NETWORK, "network"), (WAIT, "wait")];
    for (index, (colour, name)) in (0..).zip(entries) {
        let x = NAMES + index * 120;
        rectangle(area, (x, 44), (x + 14, 56), colour)?;
        text(area, name, (x + 20, 43), 14)?;
    }
    Ok(())
}

/// Draws the used share of the link rate of each tier, on average and for the busiest rank.
fn used(area: &Area<'_>, simulation: &Simulation, links: &Links, top: i32) -> Drawn {
    text(area, "used share of the link rate, 0 to 100 %", (NAMES, top), 14)?;
    for (index, class) in (0..).zip([LinkClass::Local, LinkClass::Network]) {
        let share = simulation.utilisation(class, class.link(links));
        let y = top + 24 + index * 36;
        text(area, class.name(), (14, y + 6), 14)?;
        for (line, name, share) in [(0, "average", share.mean), (1, "busiest rank", share.most)] {
            let y = y + line * 15;
            let full = f64::from(WIDTH - NAMES - RIGHT - 160);
            let to = NAMES + (full * share.clamp(0.0, 1.0)) as i32;
            rectangle(area, (NAMES, y), (WIDTH - RIGHT - 160, y + 12), WAIT)?;
            rectangle(area, (NAMES, y), (to, y + 12), colour(class))?;
            let label = format!("{:.0} % {name}", share * 100.0);
            text(area, &label, (WIDTH - RIGHT - 150, y - 1), 13)?;
        }
    }
    Ok(())
}

fn rectangle(area: &Area<'_>, from: (i32, i32), to: (i32, i32), colour: RGBColor) -> Drawn {
    Ok(area.draw(&Rectangle::new([from, to], colour.filled()))?)
}

fn text(area: &Area<'_>, text: &str, at: (i32, i32), size: i32) -> Drawn {
    Ok(area.draw(&Text::new(text.to_owned(), at, ("sans-serif", size)))?)
}

#[cfg(test)]
pub(super) mod tests {
    use peerlane::Algorithm;
    use peerlane::Rank;
    use peerlane::topology::Topology;
    use peerlane_planning::layout::Layout;
    use peerlane_planning::schedule::{self, Shape};
    use peerlane_planning::simulate::{Options, simulate};

    use peerlane::collective::Collective;

    use super::*;

    pub(crate) fn simulation(links: &Links) -> Simulation {
        let topology: Topology = "2x2".parse().unwrap();
        let shape = Shape { chunks: 2, tiers: true, ..Shape::default() };
        let layout = Layout::new(Collective::AllGather, &[1 << 20; 4], 2).unwrap();
        let options = Options { traced: Rank::all(4).collect(), ..Options::default() };
        simulate(&topology, &layout, links, &options, |rank| {
            schedule::plan(Algorithm::Hierarchical, &topology, rank, shape)
        })
        .unwrap()
    }

    #[test]
    fn lanes_links_and_times_are_shown() {
        let links = Links::default();
        let svg = render("hierarchical, 4 ranks", &simulation(&links), &links).unwrap();
        for text in [
            "hierarchical, 4 ranks",
            "rank 0 lane 0",
            "rank 3 lane 1",
            "self copy",
            "busiest rank",
            "µs",
        ] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }

    #[test]
    fn bars_stay_on_the_timeline_and_waits_are_drawn_first() {
        let simulation = simulation(&Links::default());
        let bars = bars(&simulation);
        assert!(bars.iter().all(|bar| NAMES <= bar.from && bar.from < bar.to));
        assert!(bars.iter().all(|bar| bar.to <= WIDTH - RIGHT + 1 && bar.row < 8));
        assert!(bars.is_sorted_by_key(|bar| bar.class.is_some()));
        for class in LinkClass::ALL {
            assert!(bars.iter().any(|bar| bar.class == Some(class)), "{class:?}");
        }
    }

    #[test]
    fn an_empty_simulation_is_drawn() {
        let links = Links::default();
        let mut empty = simulation(&links);
        empty.slices.clear();
        assert!(render("none", &empty, &links).is_ok());
    }
}
