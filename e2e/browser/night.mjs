// Looks at the status page in a desktop's and in a phone's browser once it shows
// what is to be seen, and prints what it found.
//
//	node night.mjs <chromium> <url> <selector of what is to be seen> <folder for screenshots> <name of the screenshots>
import {close, launch, open, patience, problems, views} from './browser.mjs';

const [executablePath, url, selector, folder, title] = process.argv.slice(2);
const browser = await launch(executablePath);

async function look(name) {
	const opened = await open(browser, name, url), {page, report} = opened;
	// what is shown changes, so all of it is read at once
	const shown = await page.waitForFunction((selector) => document.querySelector(selector) && {
		figures: [...document.querySelectorAll('.figures > div')].map((e) => e.innerText),
		problems: [...document.querySelectorAll('.problems li')].map((e) => e.innerText),
		links: [...document.querySelectorAll('.problems a')].map((a) => a.href),
	}, selector, {timeout: patience});
	report.shown = await shown.jsonValue();
	await page.screenshot({path: `${folder}/${title}-${name}.png`, fullPage: true});
	report.problems = await problems(page);
	return close(opened);
}

const looked = [];
for (const name of Object.keys(views)) looked.push(await look(name));
console.log(JSON.stringify(looked));
await browser.close();
