// Searches callers on the status page in a desktop's and in a phone's browser, with the keyboard alone, while figures change,
// and prints what it saw.
//
//	node callers.mjs <chromium> <url> <search> <found> <changes> <folder for screenshots>
// changes is a caller whose requests of the last hour become more.
import {close, launch, open, patience, problems} from './browser.mjs';

const [executablePath, url, search, found, changes, folder] = process.argv.slice(2);
const browser = await launch(executablePath);

async function look(name) {
	const opened = await open(browser, name, url), {page, report} = opened;
	for (let i = 0; i < 20 && !(await page.evaluate(() => document.activeElement.getAttribute('href') === '?callers')); i++) {
		await page.keyboard.press('Tab');
	}
	await page.keyboard.press('Enter');
	await page.locator('#search').waitFor({timeout: patience});
	await page.locator('#live[data-live=yes]').waitFor({timeout: patience});
	await page.screenshot({path: `${folder}/${name}-callers.png`});
	report.problems.push(...(await problems(page)));
	report.all = await page.locator('tr[data-caller]').count();
	const requests = page.locator(`tr[data-caller="${changes}"] td.number >> nth=1`);
	const before = await requests.textContent();
	await page.waitForFunction(([caller, before]) =>
		document.querySelector(`tr[data-caller="${caller}"]`).querySelectorAll('td.number')[1].textContent !== before, [changes, before], {timeout: patience});
	for (let i = 0; i < 20 && !(await page.evaluate(() => document.activeElement.id === 'search')); i++) {
		await page.keyboard.press('Tab');
	}
	await page.keyboard.type(search);
	await page.waitForFunction((n) => document.querySelectorAll('tr[data-caller]').length === +n, found, {timeout: patience});
	await page.waitForTimeout(1500); // an update must neither take the focus nor the text
	report.found = await page.evaluate(() => ({
		text: document.activeElement.value, address: location.search, callers: [...document.querySelectorAll('tr[data-caller]')].map((e) => e.dataset.caller),
		summary: document.querySelector('.summary').textContent,
	}));
	await page.keyboard.press('Enter');
	report.loads = await page.evaluate(() => performance.getEntriesByType('navigation').length);
	await page.reload();
	report.reloaded = await page.locator('tr[data-caller]').count();
	await page.locator('#live[data-live=yes]').waitFor({timeout: patience});
	await page.screenshot({path: `${folder}/${name}-search.png`, fullPage: true});
	return close(opened);
}

// plain is the search without JavaScript.
async function plain() {
	const context = await browser.newContext({viewport: {width: 1280, height: 900}, javaScriptEnabled: false});
	const page = await context.newPage();
	await page.goto(url + '?callers');
	await page.locator('#search').fill(search);
	await page.locator('#find button').click();
	await page.waitForURL((u) => u.searchParams.get('search') === search);
	const callers = await page.locator('tr[data-caller]').count();
	await context.close();
	return callers;
}

const watched = [await look('desktop'), await look('phone-dark')]; // of many callers, so one after the other
console.log(JSON.stringify({watched, plain: await plain()}));
await browser.close();
