//! Verified plans as text and as JSON.

use std::fmt::Write;

use peerlane::layout::Layout;
use peerlane::plan::{Cell, Plan};
use peerlane::schedule::Shape;
use peerlane::topology::Topology;
use peerlane::{Rank, schedule, verify};
use serde::Serialize;

use super::options::Options;
use crate::error::{Failure, Result};
use crate::goal::provided;

/// The plans that are shown, what is known of the plans of all ranks, and where their cells lie.
#[derive(Clone, Debug)]
pub(super) struct Document {
    topology: Topology,
    plans: Vec<Plan>,
    verdict: String,
    layout: Option<Layout>,
}

/// The JSON form.
#[derive(Serialize)]
struct Json<'a> {
    node_of_rank: &'a [u32],
    verdict: &'a str,
    plans: &'a [Plan],
    #[serde(skip_serializing_if = "Option::is_none")]
    layout: Option<JsonLayout>,
}

#[derive(Serialize)]
struct JsonLayout {
    total_bytes: u64,
    cells: Vec<JsonCell>,
}

#[derive(Serialize)]
struct JsonCell {
    cell: Cell,
    input_offset: u64,
    output_offset: u64,
    bytes: u64,
}

impl Document {
    /// Makes the plans of all ranks, verifies them, and keeps those that are asked for. Of ranks that
    /// are too many for that it makes the one plan that is asked for.
    ///
    /// # Errors
    /// If the options do not fit together, or the plans have a fault.
    pub(super) fn make(options: &Options) -> Result<Self> {
        let topology = options.topology()?;
        let usage = |error: peerlane::Error| Failure::usage(error.to_string());
        let shown = options.shown_rank(topology.ranks())?;
        let Options { parts, in_place, outputs, flags, tiers, .. } = *options;
        let collective = options.goal.collective(topology.ranks())?;
        let shape = Shape { collective, parts, in_place, outputs, flags, tiers };
        let excess = options.excess(&topology)?;
        let layout = options
            .shard_bytes(topology.ranks())?
            .map(|shard_bytes| {
                let shard_bytes = provided(collective, shard_bytes);
                let layout = Layout::new(&shard_bytes, options.parts);
                layout.and_then(|layout| layout.for_collective(collective)).map_err(usage)
            })
            .transpose()?;
        let algorithm = options.algorithm();
        let (plans, verdict) = match (excess, shown) {
            (None, _) => {
                let mut plans = schedule::plans(algorithm, &topology, shape).map_err(usage)?;
                let verdict = verdict(&plans)?;
                plans.retain(|plan| shown.is_none_or(|rank| plan.rank == rank));
                (plans, verdict)
            }
            (Some(excess), Some(rank)) => {
                let plan = schedule::plan(algorithm, &topology, rank, shape).map_err(usage)?;
                (vec![plan], format!("not verified: {excess}"))
            }
            (Some(excess), None) => {
                let advice = "lower --ranks, --nodes or --parts, plans of few ranks show the same \
                              pattern; or give the --rank whose plan is to be shown";
                return Err(Failure::usage(excess).with_advice(advice));
            }
        };
        Ok(Self { topology, plans, verdict, layout })
    }

    /// The plans, a line a step; everything else behind a `#`.
    pub(super) fn text(&self) -> String {
        let mut text = format!("# {}\n", self.topology);
        for line in self.verdict.lines() {
            text += &format!("# {line}\n");
        }
        for plan in &self.plans {
            text += &format!("\n{plan}");
        }
        if let Some(layout) = &self.layout {
            text += &layout_text(layout);
        }
        text
    }

    /// The same as one JSON object.
    ///
    /// # Errors
    /// None that is known.
    pub(super) fn json(&self) -> Result<String> {
        let document = Json {
            node_of_rank: self.topology.node_of_rank(),
            verdict: &self.verdict,
            plans: &self.plans,
            layout: self.layout.as_ref().map(|layout| JsonLayout {
                total_bytes: layout.total_bytes(),
                cells: cells(layout).map(|cell| JsonCell::new(layout, cell)).collect(),
            }),
        };
        let json = serde_json::to_string_pretty(&document);
        Ok(json.map_err(|error| Failure::failed(error.to_string()))? + "\n")
    }
}

impl JsonCell {
    fn new(layout: &Layout, cell: Cell) -> Self {
        let span = layout.cell(cell);
        Self {
            cell,
            input_offset: span.input_offset,
            output_offset: span.output_offset,
            bytes: span.bytes,
        }
    }
}

/// What the verifier says of the plans of all ranks.
///
/// # Errors
/// The fault that it found.
pub(super) fn verdict(plans: &[Plan]) -> Result<String> {
    match verify::verify(plans) {
        Ok(proof) => Ok(proof.to_string()),
        Err(fault) => {
            let story = fault.story(plans);
            Err(Failure::failed(format!("the plans have a fault: {fault}\n\n{story}\n")))
        }
    }
}

fn layout_text(layout: &Layout) -> String {
    let mut text = format!("\n# output of each rank: {} bytes\n", layout.total_bytes());
    text += "#  cell  input offset  output offset         bytes\n";
    for cell in cells(layout) {
        let span = layout.cell(cell);
        let name = cell.to_string();
        let (input, output, bytes) = (span.input_offset, span.output_offset, span.bytes);
        // Writing to a string does not fail.
        writeln!(text, "# {name:>5} {input:>13} {output:>14} {bytes:>13}").ok();
    }
    text
}

fn cells(layout: &Layout) -> impl Iterator<Item = Cell> {
    let parts = layout.parts();
    Rank::all(layout.ranks())
        .flat_map(move |shard| (0..parts).map(move |part| Cell { shard, part }))
}

#[cfg(test)]
mod tests {
    use peerlane::plan::Algorithm;

    use super::*;

    #[test]
    fn everything_that_is_no_plan_stands_behind_a_hash() {
        let topology = Topology::flat(2).unwrap();
        let shape = Shape { parts: 2, in_place: true, ..Shape::default() };
        let document = Document {
            plans: vec![schedule::plan(Algorithm::Direct, &topology, Rank(1), shape).unwrap()],
            topology,
            verdict: "proven\non two lines".to_owned(),
            layout: Some(Layout::new(&[100, 64], 2).unwrap()),
        };
        insta::assert_snapshot!(document.text(), @"
        # 2 ranks on 1 node
        # proven
        # on two lines

        all-gather direct: rank 1 of 2, 2 parts, in place
        lane 0
          signal ready to 0
          wait ready from 0
          put 1.0 input to 0
          signal arrived 1.0 to 0
          put 1.1 input to 0
          signal arrived 1.1 to 0
          wait arrived 0.0
          wait arrived 0.1

        # output of each rank: 164 bytes
        #  cell  input offset  output offset         bytes
        #   0.0             0              0            64
        #   0.1            64             64            36
        #   1.0             0            100             0
        #   1.1             0            100            64
        ");
    }
}
