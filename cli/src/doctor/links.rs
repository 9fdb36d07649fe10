//! Describes the links between GPUs, as one text if all are equal or as a matrix.

use std::fmt::Display;

use peerlane::hal::LinkKind;

use super::Finding;

/// The maximum number of rows and columns of a printed matrix.
const MATRIX_MAX: usize = 16;

/// Returns the kind of the link from one GPU to another, or `none` without peer access.
pub(super) fn text(link: Result<(LinkKind, bool), impl Display>) -> String {
    match link {
        Err(error) => format!("? ({error})"),
        Ok((LinkKind::Local, _)) => "-".to_owned(),
        Ok((kind, true)) => kind.name().to_owned(),
        Ok((_, false)) => "none".to_owned(),
    }
}

/// Returns the report line about the links between all pairs of GPUs. `alone` is the advice for a
/// single GPU, `off` the advice for GPUs without peer access.
pub(super) fn finding(
    ordinals: impl Iterator<Item = u32> + Clone,
    link: impl Fn(u32, u32) -> String,
    alone: &str,
    off: &str,
) -> Finding {
    let row = |from| ordinals.clone().map(|to| link(from, to)).collect();
    matrix_finding(&ordinals.clone().map(row).collect::<Vec<_>>(), alone, off)
}

fn matrix_finding(matrix: &[Vec<String>], alone: &str, off: &str) -> Finding {
    let topic = "links";
    let pairs = || {
        matrix.iter().enumerate().flat_map(|(from, row)| {
            row.iter().enumerate().filter(move |(to, _)| *to != from).map(|(_, link)| link.as_str())
        })
    };
    let Some(first) = pairs().next() else {
        return Finding::warning(topic, "one GPU: no peers", alone);
    };
    if pairs().all(|link| link == first) {
        let found = format!("{first} between all {} GPUs", matrix.len());
        return if first == "none" {
            Finding::missing(topic, found, off)
        } else {
            Finding::ok(topic, found)
        };
    }
    let rows = matrix.iter().take(MATRIX_MAX).enumerate().map(|(from, row)| {
        let row: Vec<_> = row.iter().take(MATRIX_MAX).map(String::as_str).collect();
        format!("{from} → [{}]", row.join(", "))
    });
    let found = rows.collect::<Vec<_>>().join("; ");
    if pairs().any(|link| link == "none") {
        Finding::warning(topic, found, off)
    } else {
        Finding::ok(topic, found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: &[&[&str]]) -> Vec<Vec<String>> {
        rows.iter().map(|row| row.iter().map(|link| (*link).to_owned()).collect()).collect()
    }

    #[test]
    fn equal_links_are_one_text() {
        let text = |rows: &[&[&str]]| matrix_finding(&matrix(rows), "alone", "off").text(5);
        insta::assert_snapshot!(text(&[&["-", "NVLink"], &["NVLink", "-"]]), @"  ok  links  NVLink between all 2 GPUs");
        insta::assert_snapshot!(text(&[&["-"]]), @"
        --  links  one GPU: no peers
                   → alone
        ");
        insta::assert_snapshot!(text(&[&["-", "none"], &["none", "-"]]), @"
        no  links  none between all 2 GPUs
                   → off
        ");
        insta::assert_snapshot!(text(&[&["-", "XGMI", "none"], &["XGMI", "-", "PCIe"], &["none", "PCIe", "-"]]), @"
        --  links  0 → [-, XGMI, none]; 1 → [XGMI, -, PCIe]; 2 → [none, PCIe, -]
                   → off
        ");
    }
}
