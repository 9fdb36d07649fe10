//! Prints verified plans as text or JSON, and verifies the plans of a file.
//!
//! A file contains the output of `peerlane plan`, possibly edited, or plans of another program:
//! text in which every plan begins with the line that names its collective, or JSON.

use std::fmt::Write;
use std::path::Path;

use peerlane::Rank;
use peerlane::collective::Collective;
use peerlane::topology::Topology;
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::{Cell, FlagOrder, ParseError, Plan, Step};
use peerlane_planning::schedule::Shape;
use peerlane_planning::{schedule, verify};
use serde::{Deserialize, Serialize};

use super::drawing;
use super::options::{COPIES_MAX, Options};
use crate::error::{Failure, Result};
use crate::printable::file_name;
use crate::report::pretty_json;
use crate::text_file;

/// The plans to print, with the verifier's result for all ranks and the byte offsets of the chunks.
#[derive(Clone, Debug)]
pub(super) struct Document {
    topology: Topology,
    plans: Vec<Plan>,
    verdict: String,
    layout: Option<Layout>,
}

#[derive(Serialize)]
struct JsonDocument<'a> {
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
    /// The rank to whose output the chunks belong, absent if the outputs of all ranks are equal.
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<u32>,
    cell: Cell,
    input_offset: u64,
    output_offset: u64,
    bytes: u64,
}

impl Document {
    /// Creates and verifies the plans of all ranks, and keeps the plans to print.
    ///
    /// If there are too many ranks to verify, it creates only the requested plan.
    pub(super) fn make(options: &Options) -> Result<Self> {
        let topology = options.topology()?;
        let usage = |error: peerlane::Error| Failure::usage(error.to_string());
        let shown = options.printed_rank(topology.ranks())?;

        let chunks = options.chunks();
        let goal = options.plan.goal.goal(topology.ranks(), options.plan.in_place)?;
        let shape = options.plan.shape(goal, FlagOrder::Prompt, options.tiers);
        let shape = Shape { chunks, ..shape };
        let size_limit = options.size_limit(&topology)?;

        let layout = options
            .block_bytes(topology.ranks())?
            .map(|block_bytes| goal.layout(&[block_bytes], chunks).map_err(usage))
            .transpose()?;

        let algorithm = options.algorithm();
        let (plans, verdict) = match (size_limit, shown) {
            (None, _) => {
                let mut plans = schedule::plans(algorithm, &topology, shape).map_err(usage)?;
                let verdict = verdict(&plans)?;
                plans.retain(|plan| shown.is_none_or(|rank| plan.rank == rank));
                (plans, verdict)
            }
            (Some(size_limit), Some(rank)) => {
                let plan = schedule::plan(algorithm, &topology, rank, shape).map_err(usage)?;
                (vec![plan], format!("not verified: {size_limit}"))
            }
            (Some(size_limit), None) => {
                let advice = "lower --ranks, --nodes or --chunks (plans of few ranks show the same \
                              pattern), or print one plan with --rank";
                return Err(Failure::usage(size_limit).with_advice(advice));
            }
        };

        Ok(Self { topology, plans, verdict, layout })
    }

    /// Returns the plans as text, one step per line; other lines begin with `#`.
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

    /// Returns a drawing of the plans, which are those of all ranks.
    pub(super) fn svg(&self) -> String {
        drawing::svg(&self.plans)
    }

    pub(super) fn json(&self) -> Result<String> {
        let document = JsonDocument {
            node_of_rank: self.topology.node_of_rank(),
            verdict: &self.verdict,
            plans: &self.plans,
            layout: self.layout.as_ref().map(|layout| JsonLayout {
                total_bytes: layout.total_bytes(),
                cells: outputs(layout)
                    .flat_map(|rank| cells(layout, rank).map(move |cell| (rank, cell)))
                    .map(|(rank, cell)| JsonCell::new(layout, rank, cell))
                    .collect(),
            }),
        };
        pretty_json(&document)
    }
}

impl JsonCell {
    fn new(layout: &Layout, output: Rank, cell: Cell) -> Self {
        let span = layout.cell(cell, output);
        Self {
            output: (!layout.collective().all_ranks_get_the_same()).then_some(output.0),
            cell,
            input_offset: span.input_offset,
            output_offset: span.output_offset,
            bytes: span.bytes,
        }
    }
}

/// Verifies the plans of all ranks and returns the proof as text, or the counterexample as a
/// failure.
pub(super) fn verdict(plans: &[Plan]) -> Result<String> {
    match verify::verify(plans) {
        Ok(proof) => Ok(proof.to_string()),
        Err(fault) => {
            let counterexample = fault.counterexample(plans);
            Err(Failure::failed(format!(
                "the verifier rejected the plans: {fault}\n\n{counterexample}\n"
            )))
        }
    }
}

fn layout_text(layout: &Layout) -> String {
    let (collective, mut text) = (layout.collective(), String::new());
    for output in outputs(layout) {
        let bytes = layout.output_bytes(output);
        let of = if collective.all_ranks_get_the_same() {
            "each rank".to_owned()
        } else {
            format!("rank {output}")
        };

        text += &format!("\n# output of {of}: {bytes} bytes\n");
        text += "#  cell  input offset  output offset         bytes\n";

        for cell in cells(layout, output) {
            let span = layout.cell(cell, output);
            let name = cell.to_string();
            let (input, output, bytes) = (span.input_offset, span.output_offset, span.bytes);
            // Writing to a string does not fail.
            writeln!(text, "# {name:>5} {input:>13} {output:>14} {bytes:>13}").ok();
        }
    }
    text
}

/// Returns the ranks whose outputs are printed, one if all outputs are equal.
fn outputs(layout: &Layout) -> impl Iterator<Item = Rank> {
    let collective = layout.collective();
    let shown = if collective.all_ranks_get_the_same() { 1 } else { layout.ranks() };
    Rank::all(layout.ranks()).filter(move |&rank| collective.is_receiver(rank)).take(shown)
}

fn cells(layout: &Layout, output: Rank) -> impl Iterator<Item = Cell> {
    let (collective, chunks) = (layout.collective(), layout.chunks());
    Rank::all(layout.ranks())
        .filter(move |&block| collective.requires(block, output))
        .flat_map(move |block| (0..chunks).map(move |chunk| Cell { block, chunk }))
}

/// The output of `--json`, of which a check needs only the plans.
#[derive(Deserialize)]
struct JsonPlans {
    plans: Vec<Plan>,
}

/// Verifies the plans of a file and returns the verifier's result.
pub(super) fn check(path: &Path) -> Result<String> {
    let text = text_file::read(path)?;
    let in_file = |failure: String| Failure::failed(format!("{}: {failure}", file_name(path)));

    let plans = parse(&text).map_err(in_file)?;
    if plans.is_empty() {
        return Err(in_file(
            "contains no plan, expected the plan of every rank".to_owned()).with_advice(
            "begin each plan with a line such as `all-gather direct: rank 0 of 4, …`, as `peerlane \
             plan` prints it",
        ));
    }

    // Plans of another program may be larger than those that `peerlane plan` prints.
    let copies = copies(&plans);
    if copies > COPIES_MAX {
        let text = format!(
            "{}: the plans make {copies} copies of cells, more than the {COPIES_MAX} that are verified",
            file_name(path)
        );
        return Err(Failure::usage(text)
            .with_advice("check plans of fewer ranks or chunks, which show the same pattern"));
    }

    let verdict = verdict(&plans)?;
    Ok(format!("{verdict}\n"))
}

fn copies(plans: &[Plan]) -> u64 {
    let steps = plans.iter().flat_map(|plan| &plan.lanes).flat_map(|lane| &lane.steps);
    steps.filter(|step| matches!(step, Step::Put { .. } | Step::Get { .. })).count() as u64
}

fn parse(text: &str) -> std::result::Result<Vec<Plan>, String> {
    let json = match text.trim_start().chars().next() {
        Some('{') => Some(serde_json::from_str(text).map(|JsonPlans { plans }| plans)),
        Some('[') => Some(serde_json::from_str(text)),
        _ => None,
    };

    if let Some(plans) = json {
        return plans.map_err(|error| {
            format!(
                "invalid JSON: expected a list of plans, or an object with the field `plans`: \
                 {error}"
            )
        });
    }

    sections(text).iter().map(Section::parse).collect()
}

/// The text of one plan in a file.
struct Section {
    /// The number of lines before it in the file.
    lines_before: usize,
    text: String,
}

impl Section {
    fn parse(&self) -> std::result::Result<Plan, String> {
        self.text.parse().map_err(|error: ParseError| {
            let line = error.line + self.lines_before;
            ParseError { line, ..error }.to_string()
        })
    }
}

fn sections(text: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();

    for (number, line) in text.lines().enumerate() {
        let line = if line.trim_start().starts_with('#') { "" } else { line };

        // A step can begin with the name of a collective too, but only a header has a colon.
        let mut goals = Collective::ALL.iter();
        if goals.any(|one| line.trim_start().starts_with(one.name())) && line.contains(':')
            || (sections.is_empty() && !line.trim().is_empty())
        {
            sections.push(Section { lines_before: number, text: String::new() });
        }

        if let Some(section) = sections.last_mut() {
            section.text.push_str(line);
            section.text.push('\n');
        }
    }

    sections
}

#[cfg(test)]
mod tests {
    use peerlane::Algorithm;
    use peerlane::topology::Topology;
    use peerlane_planning::schedule::{self, Shape};

    use super::super::options::CELLS_MAX;
    use super::*;

    #[test]
    fn all_lines_outside_of_plans_begin_with_a_hash() {
        let topology = Topology::flat(2).unwrap();
        let shape = Shape { chunks: 2, in_place: true, ..Shape::default() };
        let document = Document {
            plans: vec![schedule::plan(Algorithm::Direct, &topology, Rank(1), shape).unwrap()],
            topology,
            verdict: "proven\non two lines".to_owned(),
            layout: Some(Layout::new(Collective::AllGather, &[100, 64], 2).unwrap()),
        };
        insta::assert_snapshot!(document.text(), @"
        # 2 ranks on 1 node
        # proven
        # on two lines

        all-gather direct: rank 1 of 2, 2 chunks, in place
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

    fn plans() -> Vec<Plan> {
        let topology = Topology::flat(3).unwrap();
        let shape = Shape { chunks: 2, ..Shape::default() };
        schedule::plans(Algorithm::Direct, &topology, shape).unwrap()
    }

    #[test]
    fn text_and_json_are_read_back() {
        let plans = plans();
        let text: String = plans.iter().map(|plan| format!("# a remark\n\n{plan}")).collect();
        assert_eq!(parse(&text).unwrap(), plans);
        let list = serde_json::to_string(&plans).unwrap();
        assert_eq!(parse(&list).unwrap(), plans);
        assert_eq!(parse(&format!("{{\"plans\":{list},\"verdict\":\"\"}}")).unwrap(), plans);
        assert_eq!(parse("# nothing\n"), Ok(vec![]));
    }

    /// Plans that are printed have at most `CELLS_MAX` pairs of a chunk and a rank.
    #[test]
    fn printed_plans_are_within_the_limit_of_a_check() {
        let of_pairs = COPIES_MAX / CELLS_MAX;
        let mut most = 0;
        for nodes in [&[0; 5][..], &[0, 1, 2, 3], &[0, 0, 0, 1, 1, 1], &[0, 0, 0, 1, 2, 2]] {
            let topology = Topology::of_nodes(nodes).unwrap();
            let pairs = (nodes.len() * nodes.len() * 2) as u64;
            for (&algorithm, collective) in Algorithm::ALL
                .iter()
                .flat_map(|one| Collective::ALL.iter().map(move |goal| (one, *goal)))
            {
                let shape = Shape { collective, chunks: 2, ..Shape::default() };
                // Some algorithms have no plans for some collectives.
                let Ok(plans) = schedule::plans(algorithm, &topology, shape) else { continue };
                let copies = copies(&plans);
                assert!(
                    copies <= of_pairs * pairs,
                    "{algorithm} {collective:?} on {topology}: {copies}"
                );
                most = most.max(copies.div_ceil(pairs));
            }
        }
        assert_eq!(most, of_pairs, "the limit is larger than it must be");
    }

    #[test]
    fn errors_count_the_lines_of_the_file() {
        let [first, second, _] = plans().try_into().unwrap();
        let text = format!("# a remark\n{first}\n{second}  jump to 3\n");
        let line = text.lines().count();
        let error = parse(&text).unwrap_err();
        assert!(
            error.starts_with(&format!("invalid plan, line {line} \"jump to 3\": ")),
            "{error}"
        );
        let error = parse("hello\n").unwrap_err();
        assert!(error.starts_with("invalid plan, line 1 \"hello\": "), "{error}");
    }
}
