//! Operations on fabrics that offer several kinds of engines.

use peerlane_collectives::bootstrap::{Bootstrap as _, in_process};
use peerlane_collectives::cost::Form;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions, Report};
use peerlane_hal::{Caps, EngineOffer, ErrorKind, Rank};
use peerlane_host as host;
use peerlane_layers::{KindsLayer, Wrapped};

/// A kind that starts at once and copies slowly, and one that starts late and copies fast.
fn quick_and_bulk(own: EngineOffer) -> Vec<EngineOffer> {
    let of = |kind, start_seconds, rate| EngineOffer {
        caps: Caps { kind, ..own.caps },
        start_seconds,
        bytes_per_second: Some(rate),
        ..own
    };
    vec![of("quick", 0.0, 1e9), of("bulk", 1e-3, 1e10)]
}

/// A kind whose copies occupy compute units, and one whose copies do not.
fn blocks_and_engines(own: EngineOffer) -> Vec<EngineOffer> {
    let [mut blocks, mut engines] = [own; 2];
    (blocks.caps.kind, blocks.copy_blocks) = ("blocks", 16);
    (engines.caps.kind, engines.start_seconds) = ("engines", 1e-3);
    vec![blocks, engines]
}

const BOTH: KindsLayer = KindsLayer { kinds: quick_and_bulk, refused: None };
const REFUSED: KindsLayer = KindsLayer { refused: Some((Rank(1), "bulk")), ..BOTH };

fn run<R: Send>(
    ranks: usize,
    layer: KindsLayer,
    options: impl Fn() -> GroupOptions + Sync,
    body: impl Fn(&mut Group) -> Result<R, Error> + Sync,
) -> Vec<R> {
    let results = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = options().open(bootstrap, Wrapped::new(fabric, layer))?;
        let result = body(&mut group)?;
        group.close()?;
        Ok(result)
    });
    results.unwrap()
}

/// Runs an all-gather twice, compares its bytes, and returns how it runs.
fn gathered(group: &mut Group, bytes: usize) -> Result<Report, Error> {
    let mut gather = group.all_gather::<u8>(bytes).prepare()?;
    for start in 0..2_u8 {
        gather.input_mut()?.fill(group.rank().0 as u8 * 2 + start);
        gather.run()?;
        for (rank, block) in gather.output()?.chunks(bytes).enumerate() {
            assert!(block.iter().all(|byte| *byte == rank as u8 * 2 + start), "block {rank}");
        }
    }
    Ok(gather.report().clone())
}

fn kinds(report: &Report) -> Vec<&str> {
    report.lanes.iter().map(|lane| lane.kind).collect()
}

#[test]
fn the_kind_with_the_shortest_predicted_time_executes_an_operation() {
    for ranks in [1, 2, 3, 5] {
        run(ranks, BOTH, GroupOptions::default, |group| {
            let offered: Vec<_> = group.engines().iter().map(|kind| kind.name()).collect();
            assert_eq!(offered, ["quick", "bulk"]);
            assert_eq!(kinds(&gathered(group, 64)?), ["quick"]);

            // One rank alone copies to itself, which takes as long with both.
            let long = gathered(group, 8 << 20)?;
            let expected = if group.ranks() == 1 { "quick" } else { "bulk" };
            assert_eq!((kinds(&long), &*long.choice.engine), (vec![expected], expected));
            if group.ranks() > 1 {
                let text = long.choice.explain();
                assert!(text.contains("by quick") && text.contains(", by bulk"), "{text}");
            }
            Ok(())
        });
    }
}

#[test]
fn if_one_rank_cannot_create_engines_all_take_the_next_kind() {
    let reports = run(3, REFUSED, GroupOptions::default, |group| gathered(group, 8 << 20));
    for report in reports {
        assert_eq!(kinds(&report), ["quick"]);
        let [(kind, why)] = &report.choice.refused_engines[..] else { panic!("{report}") };
        assert_eq!(kind, "bulk");
        assert!(why.starts_with("rank 1 could not create it: "), "{why}");
        assert!(why.ends_with("the layer refuses engines of the kind bulk"), "{why}");
        assert!(report.to_string().contains("; not by bulk: rank 1 could"), "{report}");
    }
}

#[test]
fn operations_that_are_prepared_together_take_the_next_kind_one_by_one() {
    run(2, REFUSED, GroupOptions::default, |group| {
        let small = group.all_gather::<u8>(64).describe();
        let large = group.all_gather::<u8>(8 << 20).describe();
        let operations = group.prepare_all(vec![small, large])?;
        let refused: Vec<_> = operations
            .iter()
            .map(|operation| operation.report().choice.refused_engines.len())
            .collect();
        assert_eq!(refused, [0, 1]);
        Ok(())
    });
}

#[test]
fn a_named_kind_is_used_or_an_error_on_all_ranks() {
    let named = |kind: &'static str| move || GroupOptions::default().engine(kind);
    run(2, BOTH, named("quick"), |group| {
        assert_eq!(kinds(&gathered(group, 8 << 20)?), ["quick"]);

        // An operation and a smaller group can have their own.
        let report = group.all_gather::<u8>(64).engine("bulk").prepare()?.report().clone();
        assert_eq!(kinds(&report), ["bulk"]);
        let options = group.split_options().engine("bulk");
        let mut part = group.split_with(options, Some(0), 0)?.unwrap();
        assert_eq!(kinds(&gathered(&mut part, 64)?), ["bulk"]);
        part.close()
    });

    let errors = run(2, REFUSED, GroupOptions::default, |group| {
        Ok(group.all_gather::<u8>(64).engine("bulk").prepare().unwrap_err())
    });
    let expected = [ErrorKind::Aborted, ErrorKind::Unavailable];
    for (error, expected) in errors.into_iter().zip(expected) {
        assert_eq!(error.kind(), expected, "{error}");
        assert!(
            error.to_string().contains("the layer refuses engines of the kind bulk"),
            "{error}"
        );
    }
}

#[test]
fn an_unknown_kind_is_refused_with_the_kinds_that_there_are() {
    let opened = in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let options = GroupOptions::default().engine("warp");
        Ok(options.open(bootstrap, Wrapped::new(fabric, BOTH)).map(|_| ()).unwrap_err())
    });
    for error in opened.unwrap() {
        let text = "engine is \"warp\", expected a kind that all ranks offer: quick or bulk";
        assert_eq!((error.kind(), &*error.to_string()), (ErrorKind::InvalidArgument, text));
    }
}

#[test]
fn ranks_that_name_different_kinds_disagree() {
    let errors = run(2, BOTH, GroupOptions::default, |group| {
        let kind = if group.rank() == Rank(0) { "quick" } else { "bulk" };
        Ok(group.all_gather::<u8>(64).engine(kind).prepare().unwrap_err())
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(text.contains("engine is bulk on rank 1, quick on rank 0"), "{text}");
    }
}

#[test]
fn beside_compute_copies_occupy_no_compute_units() {
    let layer = KindsLayer { kinds: blocks_and_engines, refused: None };
    run(2, layer, GroupOptions::default, |group| {
        assert_eq!(kinds(&gathered(group, 1 << 20)?), ["blocks"]);
        let beside = group.all_gather::<u8>(1 << 20).beside_compute(true).prepare()?;
        assert_eq!(kinds(beside.report()), ["engines"]);
        let text = beside.report().choice.explain();
        assert!(text.contains("its copies would occupy compute units"), "{text}");
        Ok(())
    });
}

#[test]
fn shorter_starts_of_a_resizable_operation_use_the_kind_for_their_size() {
    run(3, BOTH, GroupOptions::default, |group| {
        let mut gather = group.all_gather::<u8>(8 << 20).resizable().prepare()?;
        let shorter: Vec<_> = gather.report().shorter.iter().map(|range| &*range.engine).collect();
        assert_eq!((&*gather.report().choice.engine, &shorter[..1]), ("bulk", &["quick"][..]));

        let rank = group.rank().0 as u8;
        for (start, bytes) in [8 << 20, 5, 1 << 20, 4096, 0, 8 << 20].into_iter().enumerate() {
            gather.resize(bytes)?;
            gather.input_mut()?.fill(rank * 10 + start as u8);
            gather.run()?;
            for (rank, block) in gather.output()?.chunks(bytes.max(1)).enumerate() {
                let expected = rank as u8 * 10 + start as u8;
                assert!(block.iter().all(|byte| *byte == expected), "start {start}, block {rank}");
            }
        }
        Ok(())
    });
}

#[test]
fn the_form_of_an_all_reduce_is_chosen_or_named() {
    run(3, BOTH, GroupOptions::default, |group| {
        let mut forms = Vec::new();
        for (count, form) in
            [(8, None), (4 << 20, None), (8, Some(Form::InParts)), (4 << 20, Some(Form::Whole))]
        {
            let builder = group.all_reduce::<u32>(count);
            let builder = match form {
                Some(form) => builder.form(form),
                None => builder,
            };
            let mut sum = builder.prepare()?;
            forms.push(sum.report().choice.form.unwrap());

            let rank = u32::try_from(sum.report().ranks).unwrap();
            sum.input_mut()?.fill(7);
            sum.run()?;
            assert!(sum.output()?.iter().all(|element| *element == 7 * rank));
        }
        assert_eq!(forms, [Form::Whole, Form::InParts, Form::InParts, Form::Whole]);

        let refused = |result: Result<_, Error>| result.map(|_: ()| ()).unwrap_err().to_string();
        let gather = group.all_gather::<u32>(8).form(Form::Whole).prepare().map(drop);
        let text = "form is \"whole\", expected none, because only an all-reduce has forms";
        assert!(refused(gather).contains(text));
        let in_place = group.all_reduce::<u32>(8).in_place().form(Form::Whole).prepare().map(drop);
        let text = "form is \"whole\", expected \"in parts\", because the operation runs in place";
        assert!(refused(in_place).contains(text));
        Ok(())
    });
}
