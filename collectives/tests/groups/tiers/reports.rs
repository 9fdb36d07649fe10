//! Tests reports and traces.

use insta::assert_snapshot;
use peerlane_collectives::plan::{Algorithm, LaneId, Step, Tier};
use peerlane_collectives::topology::Topology;
use peerlane_collectives::trace::Trace;
use peerlane_hal::ErrorKind;

use super::{WAITS, in_tiers};

#[test]
fn lanes_and_bytes_of_both_tiers_are_named() {
    let topology: Topology = "2x2".parse().unwrap();
    let reports = in_tiers(&topology, WAITS[1], |group| {
        let builder = group.all_gather::<u8>(100).algorithm(Algorithm::Hierarchical).chunks(2);
        let report = builder.prepare()?.report().clone();
        assert_eq!(report.fallbacks, []);
        assert_eq!(report.lanes.len(), 2);
        // The own block and the block from the other node go to the other rank of the node.
        let bytes = report.tiers.iter().map(|tier| (tier.tier, tier.put_bytes, tier.own_bytes));
        let expected = [(Tier::Local, 200, 100), (Tier::Network, 100, 0)];
        assert!(bytes.eq(expected), "{:?}", report.tiers);
        Ok(report.to_string())
    });
    assert_snapshot!(reports[0], @"hierarchical, 4 ranks, 100 bytes a block in 2 chunk(s), 400 bytes in all, 2 output(s) in turn, flags prompt; lane 0 on host by processor, waits queued; lane 1 on host (network) by processor, waits polled; local: 200 bytes put, 0 got, 100 self copy; network: 100 bytes put, 0 got, 0 self copy");
}

/// One node needs no network, and a rank that is alone on its node makes no local copies to others.
#[test]
fn a_report_has_only_lanes_with_steps() {
    in_tiers(&Topology::flat(2).unwrap(), WAITS[0], |group| {
        // The processor copies, so `strict` has nothing to refuse.
        let report = group.all_gather::<u8>(8).strict(true).prepare()?.report().clone();
        assert_eq!((report.lanes.len(), report.tiers.len()), (1, 1));
        assert_eq!((report.tiers[0].own_bytes, report.tiers[0].compute_bytes), (8, 0));
        Ok(())
    });
    in_tiers(&Topology::even(2, 1).unwrap(), WAITS[0], |group| {
        let report = group.all_gather::<u8>(8).prepare()?.report().clone();
        let put: Vec<u64> = report.tiers.iter().map(|tier| tier.put_bytes).collect();
        assert_eq!(put, [0, 8]);
        Ok(())
    });
}

const STARTS: usize = 3;

#[test]
fn a_trace_has_every_step_in_order_with_its_end() {
    let topology: Topology = "2+1".parse().unwrap();
    for waits in WAITS {
        in_tiers(&topology, waits, |group| {
            let builder = group.all_gather::<u8>(1000).algorithm(Algorithm::Hierarchical).chunks(2);
            let mut gather = builder.trace(true).prepare()?;
            for _ in 0..STARTS {
                gather.run()?;
            }
            let trace = gather.trace().unwrap();
            assert_eq!((trace.rank, trace.is_cut), (group.rank().0, false));
            assert!(trace.starts.iter().map(|start| start.epoch).eq(1..=STARTS as u64));
            for start in &trace.starts {
                assert_eq!(start.steps.len(), trace.starts[0].steps.len());
                for lane in &trace.lanes {
                    check(&trace, start.epoch, lane.lane);
                }
            }
            let bytes: u64 = trace.starts[0].steps.iter().map(|step| step.bytes).sum();
            let tiers = &gather.report().tiers;
            let expected: u64 = tiers.iter().map(|tier| tier.put_bytes + tier.own_bytes).sum();
            assert_eq!(bytes, expected);
            Ok(())
        });
    }
}

fn check(trace: &Trace, epoch: u64, lane: LaneId) {
    let start = &trace.starts[usize::try_from(epoch).unwrap() - 1];
    let steps: Vec<_> = start.steps.iter().filter(|step| step.lane == lane).collect();
    assert!(!steps.is_empty());
    for step in &steps {
        let end = step.end_ns.expect("the start is complete");
        assert!(step.submitted_ns <= step.begin_ns && step.begin_ns <= end, "{step:?}");
    }
    assert!(steps.is_sorted_by_key(|step| (step.begin_ns, step.end_ns)), "{steps:?}");
    let is_network = trace.lanes.iter().any(|of| of.lane == lane && of.tier == Tier::Network);
    // `go` first and `sent` last.
    assert_eq!(is_network, matches!(steps[0].step, Step::Wait { .. }));
}

#[test]
fn an_operation_is_traced_only_on_request() {
    in_tiers(&Topology::flat(1).unwrap(), WAITS[0], |group| {
        let mut gather = group.all_gather::<u8>(8).prepare()?;
        gather.run()?;
        assert_eq!(gather.trace(), None);
        Ok(())
    });
}

#[test]
fn replays_cannot_be_traced() {
    in_tiers(&Topology::even(2, 1).unwrap(), WAITS[0], |group| {
        // SAFETY: no graph records the operation.
        let builder = unsafe { group.all_gather::<u8>(8).capturable() };
        let error = builder.trace(true).prepare().unwrap_err();
        let text = "trace and capturable are both set, expected at most one: replays of a graph cannot be traced";
        assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::InvalidArgument, text));
        Ok(())
    });
}

#[test]
fn a_trace_is_json() {
    in_tiers(&Topology::even(2, 1).unwrap(), WAITS[1], |group| {
        let mut gather = group.all_gather::<u8>(8).trace(true).prepare()?;
        gather.run()?;
        let trace = gather.trace().unwrap();
        let json = serde_json::to_string(&trace).unwrap();
        assert_eq!(serde_json::from_str::<Trace>(&json).unwrap(), trace);
        Ok(())
    });
}
