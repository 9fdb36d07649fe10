//! Tests the plans of buffers that share memory, and the windows that groups open for them.

use peerlane_collectives::buffer_plan::{BufferPlan, CallSite, PlannedBuffer, plan_buffers};
use peerlane_collectives::error::Error;
use peerlane_hal::{ErrorKind, Rank};

use crate::support::group::in_group;

/// The largest ratio of peak and lower bound that the traces of this file may have.
const RATIO_MAX: f64 = 1.15;

fn call_site(name: impl ToString, bytes: u64, first_use: u64, last_use: u64) -> CallSite {
    CallSite { name: name.to_string(), bytes, first_use, last_use }
}

fn alignment(bytes: u64) -> u64 {
    if bytes >= 4096 { 4096 } else { 128 }
}

fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(alignment(bytes))
}

fn are_live_together(one: &CallSite, other: &CallSite) -> bool {
    one.first_use <= other.last_use && other.first_use <= one.last_use
}

/// Plans the buffers, and checks the plan against its definition.
fn checked_plan(what: &str, call_sites: &[CallSite]) -> BufferPlan {
    let plan = plan_buffers(call_sites).unwrap();
    let planned: Vec<_> = plan.buffers.iter().map(|buffer| buffer.call_site.clone()).collect();
    assert_eq!(planned, call_sites, "{what}");
    let end = |buffer: &PlannedBuffer| buffer.offset_bytes + rounded(buffer.call_site.bytes);
    for (index, one) in plan.buffers.iter().enumerate() {
        let CallSite { name, bytes, .. } = &one.call_site;
        assert_eq!(one.offset_bytes % alignment(*bytes), 0, "{what}: {name}");
        for other in &plan.buffers[..index] {
            let apart = end(one) <= other.offset_bytes || end(other) <= one.offset_bytes;
            let together = are_live_together(&one.call_site, &other.call_site);
            assert!(apart || !together, "{what}: {one:?} overlaps {other:?}");
        }
    }
    let live = |step| {
        let live = call_sites.iter().filter(|one| (one.first_use..=one.last_use).contains(&step));
        live.map(|one| rounded(one.bytes)).sum::<u64>()
    };
    let bound = call_sites.iter().map(|one| live(one.first_use)).max().unwrap_or(0);
    assert_eq!(plan.lower_bound_bytes, bound, "{what}");
    assert_eq!(plan.peak_bytes, plan.buffers.iter().map(end).max().unwrap_or(0), "{what}");
    assert_eq!(plan.separate_bytes, call_sites.iter().map(|one| rounded(one.bytes)).sum::<u64>());
    plan
}

/// Returns a trace whose number of call sites, steps, lifetimes and range of sizes depend on the seed.
fn random_trace(seed: u64) -> Vec<CallSite> {
    let random = &mut fastrand::Rng::with_seed(seed);
    let count = random.u64(8..300);
    let steps = random.u64(1..2 * count);
    let lifetime_max = random.u64(1..=steps);
    let octaves = random.u32(4..28);
    let one = |index| {
        let (first_use, octave) = (random.u64(0..steps), random.u32(0..octaves));
        let bytes = random.u64(1..64 << octave);
        call_site(index, bytes, first_use, first_use + random.u64(0..lifetime_max))
    };
    (0..count).map(one).collect()
}

#[test]
fn random_traces_are_planned_close_to_the_lower_bound() {
    let mut worst = (1.0, 0);
    for seed in 0..50 {
        let plan = checked_plan(&format!("seed {seed}"), &random_trace(seed));
        assert!(plan.ratio() <= RATIO_MAX, "seed {seed}: ratio {}", plan.ratio());
        worst = if plan.ratio() > worst.0 { (plan.ratio(), seed) } else { worst };
    }
    println!("the largest ratio is {:.4}, of seed {}", worst.0, worst.1);
}

/// Returns the gathers of a forward and a backward pass over layers. Each layer is gathered while the one before it computes.
fn layer_trace(layer_bytes: &[u64]) -> Vec<CallSite> {
    let forward = layer_bytes.iter().enumerate().map(|layer| ("forward", layer));
    let backward = layer_bytes.iter().enumerate().rev().map(|layer| ("backward", layer));
    let gather = |(step, (pass, (layer, &bytes)))| {
        call_site(format!("{pass} {layer}"), bytes, u64::saturating_sub(step, 1), step)
    };
    (0..).zip(forward.chain(backward)).map(gather).collect()
}

#[test]
fn layers_are_planned_close_to_the_lower_bound() {
    let (attention, mlp, embedding) = (4 * 4096 * 4096 * 2, 3 * 4096 * 14336 * 2, 128_256 * 8192);
    let equal = vec![attention + mlp + 4 * 4096; 32];
    let alternating: Vec<u64> = (0..64).map(|half| [attention, mlp][half % 2]).collect();
    let mut with_embeddings = alternating.clone();
    with_embeddings.insert(0, embedding);
    with_embeddings.push(embedding);
    for (what, layers) in [
        ("equal layers", equal),
        ("attention and MLP", alternating),
        ("embeddings", with_embeddings),
    ] {
        let plan = checked_plan(what, &layer_trace(&layers));
        println!("{what}: ratio {:.4}", plan.ratio());
        assert!(plan.ratio() <= RATIO_MAX, "{what}: ratio {}", plan.ratio());
        assert!(plan.separate_bytes > 8 * plan.peak_bytes, "{what}: {}", plan.separate_bytes);
    }
}

/// Returns the lowest peak of all orders in which buffers can be placed, each at its lowest free offset.
///
/// An optimal plan is found in this way: placed in the order of its offsets, no buffer is higher than there.
fn lowest_peak(call_sites: &[CallSite], placed: &mut Vec<(usize, u64)>) -> u64 {
    if placed.len() == call_sites.len() {
        let ends = placed.iter().map(|&(index, offset)| offset + rounded(call_sites[index].bytes));
        return ends.max().unwrap_or(0);
    }
    let mut lowest = u64::MAX;
    for index in 0..call_sites.len() {
        if placed.iter().any(|&(other, _)| other == index) {
            continue;
        }
        let this = &call_sites[index];
        let (bytes, step) = (rounded(this.bytes), alignment(this.bytes));
        let is_free = |offset: u64| {
            placed.iter().all(|&(other, begin)| {
                let end = begin + rounded(call_sites[other].bytes);
                !are_live_together(this, &call_sites[other])
                    || offset + bytes <= begin
                    || end <= offset
            })
        };
        let ends = placed.iter().map(|&(other, begin)| begin + rounded(call_sites[other].bytes));
        let candidates = ends.chain([0]).map(|end| end.next_multiple_of(step));
        let offset = candidates.filter(|&offset| is_free(offset)).min().unwrap();
        placed.push((index, offset));
        lowest = lowest.min(lowest_peak(call_sites, placed));
        placed.pop();
    }
    lowest
}

#[test]
fn small_traces_have_the_lowest_possible_peak() {
    let mut above_bound = 0;
    for seed in 0..4000 {
        let random = &mut fastrand::Rng::with_seed(seed);
        let steps = random.u64(3..9);
        let lifetime_max = random.u64(1..5);
        let (unit, units_max) = ([128, 1000, 3000][random.usize(0..3)], random.u64(2..6));
        let call_sites: Vec<_> = (0..1 + seed % 7)
            .map(|index| {
                let (first_use, lifetime) = (random.u64(0..steps), random.u64(0..lifetime_max));
                call_site(index, unit * random.u64(1..=units_max), first_use, first_use + lifetime)
            })
            .collect();
        let plan = checked_plan(&format!("seed {seed}"), &call_sites);
        if plan.peak_bytes > plan.lower_bound_bytes {
            above_bound += 1;
            let lowest = lowest_peak(&call_sites, &mut Vec::new());
            assert_eq!(plan.peak_bytes, lowest, "seed {seed}: {call_sites:?}");
        }
    }
    assert!(above_bound > 0, "no trace needs more than the lower bound");
    println!("{above_bound} traces need more than the lower bound");
}

#[test]
fn sizes_at_the_alignment_and_without_bytes_are_planned() {
    let sizes = [0, 1, 127, 128, 129, 4095, 4096, 4097];
    let call_sites = (0..).zip(sizes).map(|(name, bytes)| call_site(name, bytes, 3, 3));
    let plan = checked_plan("sizes", &call_sites.collect::<Vec<_>>());
    assert_eq!(plan.peak_bytes, plan.separate_bytes);
    assert_eq!(checked_plan("nothing", &[]).peak_bytes, 0);
    let ends = [call_site("a", 5, 0, u64::MAX), call_site("b", 5, u64::MAX, u64::MAX)];
    assert_eq!(checked_plan("last step", &ends).peak_bytes, 256);
}

#[test]
fn the_same_call_sites_have_the_same_plan() {
    let call_sites = random_trace(3);
    assert_eq!(plan_buffers(&call_sites).unwrap(), plan_buffers(&call_sites).unwrap());
}

#[test]
fn errors_name_the_call_site_and_the_values() {
    let refusal = |call_sites: &[CallSite]| {
        let error = plan_buffers(call_sites).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    assert_eq!(
        refusal(&[call_site("layer 1", 8, 5, 4)]),
        "call site \"layer 1\": last_use is 4, expected at least 5, its first_use"
    );
    assert_eq!(
        refusal(&[call_site("a", 8, 0, 1), call_site("b", 8, 0, 1), call_site("a", 9, 2, 3)]),
        "call sites 0 and 2 have the same name \"a\", expected a different name for each call site"
    );
    assert_eq!(
        refusal(&[call_site("a", 1 << 62, 0, 0), call_site("b", 1 << 62, 1, 1)]),
        "call site \"b\": bytes is 4611686018427387904, and the call sites before it have 4611686018427387904 bytes, expected at \
         most 9223372036854775807 bytes together"
    );
    assert!(refusal(&[call_site("a", u64::MAX, 0, 0)]).contains("bytes is 18446744073709551615"));
}

#[test]
fn names_that_do_not_fit_a_table_are_shown() {
    for bytes in [65_534, 65_535, 65_536, 1 << 20] {
        let long = "é".repeat(bytes / 2);
        let table = plan_buffers(&[call_site(&long, 1, 0, 0)]).unwrap().to_string();
        let mut lines = table.lines();
        assert_eq!(
            lines.next().map(|header| header.chars().count()),
            Some(64 + 4 * 2 + 2 * 14 + 2 * 9)
        );
        assert!(lines.next().unwrap().starts_with(&format!("{long}               0 ")));
    }
    let table = plan_buffers(&[call_site("a\n\u{1b}[31m", 1, 0, 0)]).unwrap().to_string();
    assert!(table.contains("\n\"a\\n\\u{1b}[31m\"  "), "{table}");
    assert_eq!(table.lines().count(), 7);
}

#[test]
fn more_call_sites_than_can_be_planned_are_refused() {
    let call_sites: Vec<_> = (0..100_000).map(|number| call_site(number, 1, 0, 0)).collect();
    let error = plan_buffers(&call_sites).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let text = "number of call sites is 100000, expected at most 65536, because the time to plan grows with its square";
    assert_eq!(error.to_string(), text);
}

#[test]
fn gathers_of_layers_share_a_window() {
    for ranks in 1..=4 {
        in_group(ranks, |group| {
            let me = group.rank();
            let lens = [1000, 3, 1000, 517, 1, 0];
            let bytes: Vec<u64> = lens.iter().map(|len| (len * ranks * 4) as u64).collect();
            let (window, plan) = group.window_for::<i32>(&layer_trace(&bytes))?;
            assert_eq!(window.len() as u64 * 4, plan.peak_bytes);
            assert!(plan.peak_bytes < plan.separate_bytes);
            let all: Vec<usize> = lens.iter().chain(lens.iter().rev()).copied().collect();
            let mut gathers = Vec::new();
            for (len, buffer) in all.iter().zip(&plan.buffers) {
                let begin = buffer.begin::<i32>();
                gathers.push(group.all_gather(*len).output_into(&window, begin).prepare()?);
            }
            let value = |rank: Rank, step: usize| (100 * step + rank.index()) as i32;
            let check = |step: usize| {
                let (len, begin) = (all[step], plan.buffers[step].begin::<i32>());
                let output = window.slice(begin..begin + len * ranks)?;
                for rank in Rank::all(ranks) {
                    let block = &output[rank.index() * len..][..len];
                    assert!(block.iter().all(|&element| element == value(rank, step)));
                }
                Ok::<_, Error>(())
            };
            for (step, gather) in gathers.iter_mut().enumerate() {
                gather.input_mut()?.fill(value(me, step));
                gather.run()?;
                // The layer before this one is still live.
                (step.saturating_sub(1)..=step).try_for_each(check)?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_window_for_no_call_sites_is_empty() {
    in_group(2, |group| {
        let (window, plan) = group.window_for::<f32>(&[])?;
        assert_eq!((window.len(), plan.peak_bytes), (0, 0));
        Ok(())
    });
}

fn refusal(ranks: usize, call_sites: impl Fn(Rank) -> Vec<CallSite> + Sync) -> String {
    let texts = std::sync::Mutex::new(Vec::new());
    in_group(ranks, |group| {
        let error = group.window_for::<f32>(&call_sites(group.rank())).unwrap_err();
        texts.lock().unwrap().push(error.to_string());
        // The group stays usable.
        group.window_for::<f32>(&[call_site("a", 4, 0, 0)]).map(drop)
    });
    let texts = texts.into_inner().unwrap();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    texts[0].clone()
}

#[test]
fn ranks_with_different_call_sites_get_an_error_that_names_the_field() {
    for ranks in 2..=4 {
        let last = move |rank: Rank| rank.index() == ranks - 1;
        let with = |one: CallSite| vec![call_site("embedding", 400, 0, 1), one];
        let disagree = |what: &str, seen: &str, expected: &str| {
            let rank = ranks - 1;
            format!(
                "window 1: ranks disagree: {what} is {seen} on rank {rank}, {expected} on rank 0"
            )
        };
        assert_eq!(
            refusal(ranks, |rank| with(call_site("layer", if last(rank) { 8 } else { 4 }, 1, 2))),
            disagree("bytes of call site layer", "8", "4")
        );
        assert_eq!(
            refusal(ranks, |rank| with(call_site("layer", 4, 1, if last(rank) { 2 } else { 3 }))),
            disagree("last_use of call site layer", "2", "3")
        );
        assert_eq!(
            refusal(ranks, |rank| with(call_site(if last(rank) { "b" } else { "a" }, 4, 1, 2))),
            disagree("name of call site 1", "b", "a")
        );
        let many = |count: u64| (0..count).map(|index| call_site(index, 4, index, index));
        assert_eq!(
            refusal(ranks, |rank| many(if last(rank) { 3 } else { 2 }).collect()),
            disagree("call_sites", "3", "2")
        );
        let text = refusal(ranks, |rank| {
            let mut many: Vec<_> = many(200).collect();
            many[130].first_use -= u64::from(last(rank));
            many
        });
        let start = "window 1: ranks disagree: the digest of call sites 128 to 131 is ";
        assert!(text.starts_with(start), "{text}");
    }
}

#[test]
fn wrong_call_sites_on_one_rank_are_an_error_on_all() {
    in_group(2, |group| {
        let is_wrong = group.rank().0 == 1;
        let last_use = if is_wrong { 0 } else { 2 };
        let error = group.window_for::<f32>(&[call_site("a", 4, 1, last_use)]).unwrap_err();
        let cause = "call site \"a\": last_use is 0, expected at least 1, its first_use";
        let failed = format!("window 1: rank 1 failed (invalid argument): {cause}");
        assert_eq!(error.to_string(), if is_wrong { cause } else { &failed });
        Ok(())
    });
}
