//! Changes plans by their text.

use peerlane_collectives::plan::Plan;

/// Replaces the one place where the text of `plan` reads `from`.
pub(crate) fn edit(plan: &mut Plan, from: &str, to: &str) {
    let text = plan.to_string();
    assert_eq!(text.matches(from).count(), 1, "{from:?} must stand once in\n{text}");
    *plan = text.replace(from, to).parse().unwrap();
}
