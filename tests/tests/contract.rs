//! Checks that the contract's bold sentences and the checks are the same list.

use peerlane_tests::checks::all;

const CONTRACT: &str = include_str!("../../hal/CONTRACT.md");

/// The bold sentences, as names: topic and sentence in snake case.
fn sentences() -> Vec<String> {
    let mut names = Vec::new();
    for chapter in CONTRACT.split("\n## ").skip(1) {
        let title = chapter.lines().next().unwrap_or_default();
        let topic = title.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.' || c == ' ');
        // Between two pairs of asterisks: every second part.
        let bold = chapter.split("**").skip(1).step_by(2);
        names.extend(bold.map(|sentence| format!("{} {}", topic_module(topic), snake(sentence))));
    }
    names
}

fn snake(sentence: &str) -> String {
    let kept = sentence.to_lowercase().replace('\'', "").replace(['.', ',', '*'], "");
    kept.split_whitespace().collect::<Vec<_>>().join("_")
}

/// A chapter's file is called by the first word of its title, or by all where it is a phrase.
fn topic_module(title: &str) -> String {
    let words = title.split(" and ").next().unwrap_or(title);
    snake(words)
}

#[test]
fn every_bold_sentence_is_a_check_and_every_check_a_sentence() {
    let checks: Vec<String> =
        all().iter().map(|check| format!("{} {}", check.topic, check.name)).collect();
    let sentences = sentences();
    let missing: Vec<_> = sentences.iter().filter(|name| !checks.contains(name)).collect();
    assert!(missing.is_empty(), "sentences without a check: {missing:#?}");
    let strange: Vec<_> = checks.iter().filter(|name| !sentences.contains(name)).collect();
    assert!(strange.is_empty(), "checks without a sentence: {strange:#?}");
    assert_eq!(checks, sentences, "the checks are in the order of the contract, each once");
}

#[test]
fn a_sentence_becomes_a_name() {
    assert_eq!(snake("One's own key\n  gives an alias."), "ones_own_key_gives_an_alias");
    assert_eq!(topic_module("Polling and parking"), "polling");
    assert_eq!(topic_module("All or nothing"), "all_or_nothing");
}
