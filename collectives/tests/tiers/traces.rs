//! Traces of starts.

use peerlane_collectives::plan::{Algorithm, LaneId, Step, Tier};
use peerlane_collectives::topology::Topology;
use peerlane_collectives::trace::Trace;
use peerlane_hal::ErrorKind;

use crate::support::{WAITS, in_tiers};

const STARTS: usize = 3;

#[test]
fn every_step_is_there_in_order_and_has_ended() {
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
            let wanted: u64 = tiers.iter().map(|tier| tier.put_bytes + tier.own_bytes).sum();
            assert_eq!(bytes, wanted);
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
fn what_was_not_asked_for_is_not_traced() {
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
        let error = group.all_gather::<u8>(8).capturable().trace(true).prepare().unwrap_err();
        let text = "trace is set for a capturable operation, whose replays cannot be traced; expected one of them";
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
